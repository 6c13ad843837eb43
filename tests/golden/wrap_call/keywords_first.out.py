def step(network, x, i):
    return lean.rollout_call(network, rows, i, site="uncond", state=x, **x)
