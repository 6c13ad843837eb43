def train(rows):
    return torch.stack([torch.randperm(9, device=rows.device) for _ in range(rows)])
