"""An ordinary CPU program: it never names a device but the CPU, and knows nothing of lazytensor."""

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
points = torch.from_numpy(numpy.linspace(-1, 1, 32, dtype=numpy.float32)[:, None])
loader = DataLoader(TensorDataset(points, points**2), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    for x, target in loader:
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
grid = torch.zeros(3, device="cpu")
grid += torch.arange(3)
print("loss", float(loss.detach().numpy()), "grid", grid.cpu().tolist())
