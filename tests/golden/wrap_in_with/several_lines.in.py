def train(prompts):
    # one rollout
    rewards, latents = sample(
            prompts,  # all

            3,
        )  # done
    return rewards
