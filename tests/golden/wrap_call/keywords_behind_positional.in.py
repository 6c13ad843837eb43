def step(network, x, i):
    return network(
        x,
        *x,  # more
        scale=2,
    )
