"""Repairs Triton's interpreter, in which the kernels run where there is no CUDA device."""

import triton.runtime.interpreter as interpreter


def repair() -> None:
    """Triton 3.6 turns its one-element arrays into loop bounds with int(), which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
