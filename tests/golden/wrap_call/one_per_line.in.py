def step(network, x, i):
    network.eval()
    y= network(
            state=x,
            # the scale
            scale = 2,  # of all
            guide=make(
                3,
            ),
    )[0]
    return y
