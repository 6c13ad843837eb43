def step(network, i):
    return lean.rollout_call(network, rows, i)
