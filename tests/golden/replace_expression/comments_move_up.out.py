def train(rows):
    x = 1
    # above
    # all steps
    # per row
    perms = lean.step_order(rows, 9)
    return perms
