def step(network, x, i):
    return network(  # the policy
        x,
    )
