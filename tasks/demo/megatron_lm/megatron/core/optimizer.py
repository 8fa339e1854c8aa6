"""Adam with clipping by the global norm. It changes the arrays it was given, in place."""

import numpy as np


class Adam:
    """First and second moments by parameter name, and the number of updates so far."""

    def __init__(self, parameters, betas=(0.9, 0.98), epsilon=1e-8, weight_decay=0.0, clip_grad=1.0):
        self.parameters = parameters
        self.betas, self.epsilon, self.weight_decay, self.clip_grad = betas, epsilon, weight_decay, clip_grad
        self.updates = 0
        self.first = {n: np.zeros_like(p) for n, p in parameters.items()}
        self.second = {n: np.zeros_like(p) for n, p in parameters.items()}

    def step(self, gradients, lr):
        """Apply one update; return the norm of the gradients before clipping."""
        norm = float(np.sqrt(sum((g * g).sum() for g in gradients.values())))
        scale = min(1.0, self.clip_grad / (norm + 1e-6))
        self.updates += 1
        beta1, beta2 = self.betas
        for name, parameter in self.parameters.items():
            g = gradients[name] * scale
            self.first[name] += (1.0 - beta1) * (g - self.first[name])
            self.second[name] += (1.0 - beta2) * (g * g - self.second[name])
            mean = self.first[name] / (1.0 - beta1**self.updates)
            spread = self.second[name] / (1.0 - beta2**self.updates)
            parameter -= lr * (mean / (np.sqrt(spread) + self.epsilon) + self.weight_decay * parameter)
        return norm

    def state_dict(self):
        """Return {key: array} with everything that the next update depends on."""
        state = {"updates": np.array(self.updates)}
        for name in self.parameters:
            state["first/" + name], state["second/" + name] = self.first[name], self.second[name]
        return state

    def load_state_dict(self, state):
        """Take over what `state_dict` gave; KeyError where a parameter is absent."""
        self.updates = int(state["updates"])
        for name in self.parameters:
            self.first[name], self.second[name] = state["first/" + name].copy(), state["second/" + name].copy()
