"""Packaging: ``edgc``, and ``megatron.edgc`` as a portion of the ``megatron`` namespace package.

There is no ``megatron/__init__.py`` (PEP 420), so this portion sits beside the installed ``megatron.core``
and ``megatron.training`` and never shadows them. Dependencies are declared here and nowhere else; the
versions that the project's own scripts install are pinned in ``constraints.txt``.
"""

from setuptools import find_namespace_packages, setup

setup(
    name="edgc",
    version="0.1.0",
    description="Entropy-driven gradient compression for unmodified Megatron-core",
    python_requires=">=3.12",
    # Says what is the default anyway, but makes `pip install -e .` write a .pth file that names this folder
    # instead of an import hook: Python then merges the portions itself, and type checkers see both.
    package_dir={"": "."},
    packages=find_namespace_packages(include=["edgc", "edgc.*", "megatron.edgc", "megatron.edgc.*"]),
    install_requires=[
        # Megatron-core's own floor and no upper bound: an environment that brings its torch (NGC images,
        # clusters) keeps it.
        "torch>=2.6",
        "numpy",
        # Tested with 0.19. EDGC uses private names, so it compares their sources when it starts, and refuses where they
        # differ (megatron/edgc/seam.py). Hence no upper bound: an environment that brings a newer one keeps it.
        "megatron-core>=0.19",
        # Megatron imports it when it saves a checkpoint; its wheel does not declare it.
        "psutil",
        # The tokenizer and the progress bars of tools/.
        "sentencepiece",
        "tqdm",
    ],
    # No extra for apex: the package of that name on PyPI is another project (docs/install.md).
    extras_require={
        # tools/export_hf.py and tools/evaluate.py. lm_eval runs Hugging Face models through accelerate.
        "evaluate": ["accelerate", "lm_eval", "protobuf", "transformers"],
        "te": ["transformer-engine[pytorch]"],
        "train": ["datasets", "matplotlib", "pyyaml", "tensorboard", "transformers"],
        "test": ["mypy", "pytest", "ruff"],
    },
)
