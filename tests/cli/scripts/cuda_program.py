"""An ordinary CUDA program: it knows nothing of lazytensor."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert torch.cuda.device_count() == 1
    torch.manual_seed(3)
    torch.cuda.manual_seed_all(3)
    data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, pin_memory=True)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3)).cuda()
    model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(arguments.epochs):
        for x, target in loader:
            x, target = x.to(device, non_blocking=True), target.cuda()
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), target)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    extra = torch.zeros(2, device=torch.device("cuda:0"))
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
    assert extra.is_cuda
    assert not torch.ones(2).is_cuda
    print(f"device {extra.device.type} epochs {arguments.epochs} loss finite {bool(torch.isfinite(loss))}")


if __name__ == "__main__":
    main()
