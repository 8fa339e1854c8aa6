"""Tests marked `accelerator` are left out where there is none, which is everywhere in the demo."""


def pytest_collection_modifyitems(config, items):
    needing = [item for item in items if item.get_closest_marker("accelerator") is not None]
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]
