// Memory for what a compiled step makes and drops again: every step makes the same, so each has a place for good.
//
// With the C library's heaps a ResNet program held 71 MB and with this 61; where what is free is given back at once, every
// step has page faults instead.  Here the first run of a graph is watched: which
// allocations there are, how large, in which order they are made and dropped.  From that follows where each can lie so
// that those which exist at the same time lie side by side.  Later runs take these places in the order of the plan;
// what comes otherwise than planned is allocated as usual.
//
// The allocator is PyTorch's own for the CPU, with this in front.  Other threads and other allocations pass through.

#include "arena.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <unordered_set>

#include <sys/mman.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <c10/core/CPUAllocator.h>

namespace arena {

namespace {

constexpr size_t SMALL = 4096;       // bytes; less is made as usual
constexpr size_t APART = 64;         // bytes; what PyTorch aligns memory to
constexpr size_t WORTH = 8 << 20;    // free bytes; less is asked for again soon
constexpr int MOST_MISSING = 4;      // allocations in a row that may fail to come
constexpr int SETTLED[] = {20, 60};  // runs as planned, after which what came before them has left free memory
constexpr int MOST_SURPRISES = 100;  // runs not as planned, then there is no plan

char* base = nullptr;
size_t reserved = 0;
std::atomic<bool> taken = false;  // by a run
std::atomic<int> inside = 0;      // blocks that lie here

thread_local Plan* running = nullptr;

// Give back what is free, if it is so much; as `give_back` in heap.py.
void trim(size_t worth) {
#ifdef __GLIBC__
#if __GLIBC_PREREQ(2, 33)
  if (mallinfo2().fordblks < worth) return;
#endif
  malloc_trim(0);
#endif
}

class InFront final : public c10::Allocator {
 public:
  static c10::Allocator* usual;
  static c10::DeleterFnPtr usual_release;

  c10::DataPtr allocate(size_t bytes) override {
    Plan* plan = bytes < SMALL ? nullptr : running;
    if (plan != nullptr) {
      if (void* place = plan->allocate(bytes)) return {place, place, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DataPtr memory = usual->allocate(bytes);
    if (plan != nullptr) plan->made(memory.get(), bytes);
    TORCH_CHECK(memory.compare_exchange_deleter(usual_release, &release));
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static void release(void* memory) {
    if (running != nullptr) running->dropped(memory);
    if (holds(memory)) {
      inside--;
    } else {
      usual_release(memory);
    }
  }
};

c10::Allocator* InFront::usual = nullptr;
c10::DeleterFnPtr InFront::usual_release = nullptr;

// Give every block that does not outlive the run a place: the largest first, each in the narrowest gap between those that
// exist at the same time.
size_t lay_out(std::vector<Plan::Block>& blocks) {
  std::vector<Plan::Block*> order, placed;
  for (Plan::Block& block : blocks) {
    if (!block.outlives()) order.push_back(&block);
  }
  std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->bytes > b->bytes; });
  size_t size = 0;
  for (Plan::Block* block : order) {
    size_t best = SIZE_MAX, narrowest = SIZE_MAX, end = 0;
    for (Plan::Block* other : placed) {  // by where they lie
      if (other->made > block->dropped || other->dropped < block->made) continue;
      if (other->offset >= end + block->bytes && other->offset - end < narrowest) {
        narrowest = other->offset - end;
        best = end;
      }
      end = std::max(end, other->offset + (other->bytes + APART - 1) / APART * APART);
    }
    block->offset = best == SIZE_MAX ? end : best;
    size = std::max(size, block->offset + block->bytes);
    auto behind = [](auto* a, auto* b) { return a->offset < b->offset; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), block, behind), block);
  }
  return size;
}

}  // namespace

bool holds(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(base) < reserved;
}

void Plan::begin() {
  if (base == nullptr || state == NEVER || taken.exchange(true)) return;
  runs = true;
  follows = state == FOLLOW && inside == 0;
  if (follows || state == LEARN) running = this;
  next = 0;
}

void Plan::end(bool completed) {
  if (!runs) return;
  runs = false;
  running = nullptr;
  if (state == LEARN) {
    if (completed) {
      learn();
    } else {
      blocks.clear();
      events.clear();
    }
  } else if (follows && completed) {
    while (next < events.size() && is_over(events[next])) next++;
    if (next < events.size()) mend();
    runs_planned++;
    if (std::ranges::find(SETTLED, runs_planned) != std::end(SETTLED)) trim(0);
  }
  alive.clear();
  taken = false;
}

void* Plan::allocate(size_t bytes) {
  if (!follows) return nullptr;
  size_t found = next;
  for (int missing = 0; found < events.size(); found++) {
    const Event& event = events[found];
    if (event.drop) {
      if (!is_over(event)) return nullptr;
    } else if (blocks[event.block].bytes == bytes) {
      break;
    } else if (++missing > MOST_MISSING) {
      return nullptr;
    }
  }
  if (found == events.size()) return nullptr;
  size_t number = events[found].block;
  next = found + 1;
  if (blocks[number].outlives()) return nullptr;
  void* place = base + blocks[number].offset;
  alive[place] = number;
  inside++;
  return place;
}

void Plan::made(void* memory, size_t bytes) {
  if (state != LEARN) return;
  alive[memory] = blocks.size();
  events.push_back({blocks.size(), false});
  blocks.push_back({bytes, events.size(), 0, 0});
}

void Plan::dropped(void* memory) {
  auto found = alive.find(memory);
  if (found == alive.end()) return;
  if (state == LEARN) {
    events.push_back({found->second, true});
    blocks[found->second].dropped = events.size();
  }
  alive.erase(found);
}

// The drop of a block that is not there: it went sooner than planned, or was not made.
bool Plan::is_over(const Event& event) const {
  return event.drop && !alive.contains(base + blocks[event.block].offset);
}

void Plan::learn() {
  size = lay_out(blocks);
  state = size <= reserved ? FOLLOW : NEVER;
  trim(WORTH);  // what this run has freed will not be asked for again
}

// The block that the plan waited for in vain, and those that are still there, have no place in it any more.
void Plan::mend() {
  std::unordered_set<size_t> unsteady{events[next].block};
  for (auto [memory, block] : alive) unsteady.insert(block);
  std::erase_if(events, [&](const Event& event) { return unsteady.contains(event.block); });
  if (++surprises == MOST_SURPRISES) state = NEVER;
}

void open(size_t bytes) {
  if (base != nullptr || bytes == 0) return;
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return;
  InFront::usual = c10::GetCPUAllocator();
  InFront::usual_release = InFront::usual->raw_deleter();
  if (InFront::usual_release == nullptr) {
    munmap(found, bytes);
    return;
  }
  base = static_cast<char*>(found);
  reserved = bytes;
  c10::SetCPUAllocator(new InFront());
}

void empty() {
  if (base == nullptr || taken.exchange(true)) return;
  if (inside == 0) madvise(base, reserved, MADV_DONTNEED);
  taken = false;
}

}  // namespace arena
