def train(prompts):
	with torch.no_grad():
		before()
		with torch.no_grad():
			sample(prompts)
