def step(network, x, i):
    return lean.rollout_call(network, rows, i, x, site="uncond")
