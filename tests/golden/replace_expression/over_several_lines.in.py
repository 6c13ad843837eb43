def train(rows, steps, device):
    perms = torch.stack(
        [
            torch.randperm(len(steps["t"][0]))
            for _ in range(rows)
        ]
    ).to(device) 
    return perms
