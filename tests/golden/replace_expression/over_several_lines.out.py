def train(rows, steps, device):
    perms = lean.step_order(rows, len(steps["t"][0])).to(device) 
    return perms
