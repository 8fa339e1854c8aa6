"""What every provider shares: hooks, and building the model with or without an adapter."""


class ModelProviderMixin:
    """A provider answers `provide()`; this adds hooks that run on the finished model, in order."""

    def register_pre_wrap_hook(self, hook):
        """Add a function model -> model."""
        self.__dict__.setdefault("_pre_wrap_hooks", []).append(hook)

    def provide_distributed_model(self):
        """Build the model and pass it through the hooks. One rank: nothing is distributed in the demo."""
        model = self.provide()
        for hook in self.__dict__.get("_pre_wrap_hooks", []):
            model = hook(model)
        return model
