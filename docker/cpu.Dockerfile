# An image for machines without a GPU: the quickstart, conversions, plans, tests.
#   docker build -f docker/cpu.Dockerfile -t vapo-megatron:cpu .
#   docker run --rm -v "$PWD/runs:/opt/vapo-megatron/runs" vapo-megatron:cpu make quickstart
# Not built yet: no machine with a Docker engine was at hand. Its steps are those of the Makefile, which CI runs.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PATH=/opt/vapo-megatron/.venv/bin:$PATH

# A compiler for torch's and SGLang's helpers that are built when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential git make \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/vapo-megatron
# What `make install` needs, before the sources: a change of the code does not install everything anew.
COPY Makefile setup.py README.md LICENSE ./
COPY requirements requirements
COPY vapo_megatron/__init__.py vapo_megatron/__init__.py
RUN make install

COPY . .
CMD ["vapo-megatron", "--help"]
