# An image for nodes with H100 or H200 GPUs: CUDA, Transformer Engine, SGLang and this package.
#   docker build -f docker/h100.Dockerfile -t vapo-megatron:h100 .
#   enroot import -o vapo.sqsh dockerd://vapo-megatron:h100        # for Slurm with pyxis: CONTAINER=/shared/vapo.sqsh
# Not built yet: no machine with a Docker engine was at hand. docs/gpu.md says what of it has run.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    CUDA_HOME=/usr/local/cuda \
    PATH=/opt/vapo/bin:/usr/local/cuda/bin:$PATH \
    MELLANOX_VISIBLE_DEVICES=all

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# g++ and Python's headers compile Transformer Engine and, when an engine starts, its kernels; numactl brings
# libnuma, which SGLang loads; ibverbs-providers knows the network adapters, without it NCCL goes over TCP (and
# MELLANOX_VISIBLE_DEVICES has enroot's hook pass them into the container); procps has the pkill that asks ranks to save (docs/slurm.md, examples/kubernetes).
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends \
      build-essential git ibverbs-providers ibverbs-utils libibverbs1 librdmacm1 ninja-build numactl procps python3.12 python3.12-dev python3.12-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3.12 -m venv /opt/vapo

WORKDIR /opt/vapo-megatron
COPY requirements/h100.txt requirements/h100.txt
RUN pip install -r requirements/h100.txt

# Its own layer: the build takes long, and depends on the PyTorch above alone. cuDNN's and NCCL's headers come with
# PyTorch's packages, where no compiler looks by itself; the toolkit's nvcc must be the first on PATH, as pip may bring
# a newer one than the driver knows.
ARG TRANSFORMER_ENGINE=2.11.0
RUN site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
 && CPLUS_INCLUDE_PATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include" \
    NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_CUDA_ARCHS=90 \
    pip install --no-build-isolation "transformer-engine[core-cu13,pytorch]==${TRANSFORMER_ENGINE}"

COPY . .
RUN pip install --no-deps --no-build-isolation -e .

ENTRYPOINT []
CMD ["vapo-megatron", "--help"]
