def train(prompts):
    x = sample("""
kept
    as it is
""")
    return x
