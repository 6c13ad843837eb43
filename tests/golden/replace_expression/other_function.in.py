def evaluate(rows):
    return torch.stack([torch.randperm(9) for _ in range(rows)])
