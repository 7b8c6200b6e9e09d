// Memory for what a compiled step makes and drops again.  See arena.cpp.

#pragma once

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace arena {

// Where the temporaries of one graph lie: learnt from a run of it, good for every later one.
class Plan {
 public:
  struct Block {
    size_t bytes;
    size_t made, dropped;  // at which event; a block that is not dropped outlives the run
    size_t offset;
    bool outlives() const { return dropped == 0; }
  };

  // Begin a run in the calling thread, and end it; to end one that has ended does nothing.  A run that begins while another has the arena goes without.
  void begin();
  void end(bool completed);

  // An allocation of the run: its place, or none if it is to be made as usual.
  void* allocate(size_t bytes);
  // It has been made as usual.
  void made(void* memory, size_t bytes);
  // The run has let go of memory; which it may never have had.
  void dropped(void* memory);

  size_t bytes() const { return state == FOLLOW ? size : 0; }

 private:
  // An event is a block made, or one dropped.
  struct Event {
    size_t block;
    bool drop;
  };

  void learn();
  void mend();
  bool is_over(const Event& event) const;

  enum { LEARN, FOLLOW, NEVER } state = LEARN;
  std::vector<Block> blocks;
  std::vector<Event> events;
  std::unordered_map<void*, size_t> alive;  // of this run
  size_t size = 0;
  size_t next = 0;       // the event that should come now
  bool runs = false;     // the arena is this run's
  bool follows = false;  // and it takes the places of the plan
  int runs_planned = 0;
  int surprises = 0;     // runs that were not as planned
};

// Whether memory lies in the arena, where the next run will write.
bool holds(const void* memory);

// Reserve addresses for so many bytes, from now on used by runs; once for a process.
void open(size_t bytes);

// Give its memory back to the system, unless a run has it.
void empty();

}  // namespace arena
