# MegaRL for NVIDIA GPUs, with the packages that launch/requirements-gpu.lock pins. docs/howto/containers.md says how to
# build and run it, with vLLM and for CPU ranks, too.
#     docker build -t megarl .
ARG PYTHON=python:3.12-slim-trixie
FROM ${PYTHON}

# Triton compiles with gcc while a run goes on. tini, as process 1, passes signals on and collects processes that ended.
# Debian keeps only the newest release of a package, so that no version can be pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megarl
ENV PATH=/opt/venv/bin:$PATH
COPY launch/*.txt launch/*.lock launch/
# The lock for CPU ranks has no torch: pip takes the build for CUDA or for the CPU, as it is configured.
ARG PINS=requirements-gpu
RUN python3 -m venv /opt/venv \
    && { grep -q '^torch==' "launch/$PINS.lock" \
        || pip install --no-cache-dir "$(grep '^torch==' "launch/$PINS.txt")"; } \
    && pip install --no-cache-dir --no-deps --require-hashes -r "launch/$PINS.lock"
ARG ENGINE=native
RUN if [ "$ENGINE" = vllm ]; then pip install --no-cache-dir -r launch/requirements-vllm.txt; fi

COPY . .
# Anyone may write into the home and into /work/runs: `docker run --user` gives an id that the image does not know.
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && rm -r build megarl.egg-info \
    && useradd --create-home --uid 1000 megarl \
    && install -d --owner=megarl /work /work/runs \
    && chmod 1777 /home/megarl /work/runs
# HOME and USER are for caches of torch and Triton, which ask who runs them. CUDA_DEVICE_MAX_CONNECTIONS=1 is Megatron-
# Core's order of kernels. NVIDIA_* is read by what brings the driver into a container.
ENV HOME=/home/megarl USER=megarl OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
ENTRYPOINT ["tini", "--", "megarl"]
CMD ["doctor"]
