import torch


def broken() -> None:
    torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")


broken()
