class Trainer:
    async def step(self):
        return self

class Other:
    def step(self):
        return self
