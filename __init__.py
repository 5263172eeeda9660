"""The package itself, for `import autopar` in the folder that holds a checkout of this name.

Without this file Python takes the checkout for a namespace package there, in front of an editable installation: an
empty `autopar`, and no error.
"""

from pathlib import Path

if __name__ == "autopar":
    _PACKAGE = Path(__file__).parent / "autopar"
    __path__ = [str(_PACKAGE)]
    __file__ = str(_PACKAGE / "__init__.py")
    if __spec__ is not None:
        __spec__.submodule_search_locations = __path__
    exec(compile(_PACKAGE.joinpath("__init__.py").read_text(), __file__, "exec"))
