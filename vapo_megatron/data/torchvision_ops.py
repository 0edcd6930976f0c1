"""transformers imports torchvision where it is installed; a torchvision built for CUDA fails to import on a CPU torch.

Its compiled operators do not load there, and it then registers a fake kernel for an operator that has no schema
("operator torchvision::nms does not exist"). Nothing here ever calls these operators: their schemas are enough.
"""

import torch

_SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))
_library: torch.library.Library | None = None  # the schemas live as long as this object


def make_torchvision_importable() -> None:
    """Declare the operators that torchvision's import needs, if and only if its own did not load.

    To be called before the first import of a transformers model or config. Does nothing without torchvision.
    """
    global _library
    try:
        import torchvision
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if _library is not None or "torchvision::nms" not in str(error):
            raise
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _SCHEMAS:
            _library.define(schema)
        import torchvision  # noqa: F401
