def train(prompts):
    with (
        torch.no_grad(),
        timer(),
    ):
        sample(prompts)
