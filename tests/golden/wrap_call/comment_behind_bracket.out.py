def step(network, x, i):
    return lean.rollout_call(  # the policy
        network, rows, i,
        x,
    )
