# dflash-local in a container, for the CPU and for NVIDIA GPUs:
#
#   docker build -t dflash-local .
#   docker run -it -v dflash:/data dflash-local run qwen3-8b
#
#   docker build --target cuda -t dflash-local:cuda .
#   docker run --gpus all -p 8080:8080 -v dflash:/data -e DFLASH_LOCAL_API_KEY=... \
#       dflash-local:cuda serve --host 0.0.0.0 --target qwen3-8b
#
# /data keeps the models and what was measured. The build is for any x86-64 CPU with AVX2, or any arm64 one.

FROM debian:trixie-slim AS build-cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates cmake g++ git ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/dflash-local
ENV PATH=/opt/dflash-local/bin:$PATH
# First what rarely changes: llama.cpp.
ARG LLAMA=0.3.36
RUN CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_RPC=ON -DMTMD_VIDEO=OFF" \
    pip install --no-cache-dir "llama-cpp-python==$LLAMA" "scikit-build-core>=0.11" "nanobind>=2.4"
COPY . /src
RUN pip install --no-cache-dir --require-hashes -r /src/requirements.lock \
    && pip install --no-cache-dir --no-build-isolation /src

FROM nvidia/cuda:12.8.1-devel-ubuntu24.04 AS build-cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates cmake g++ git ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/dflash-local
ENV PATH=/opt/dflash-local/bin:$PATH
ARG LLAMA=0.3.36
# Of one's own GPU alone, such as 89, they take a fraction of the time: --build-arg CUDA_ARCHITECTURES=89
ARG CUDA_ARCHITECTURES=75;80;86;89;90;120
# While it is built there is no driver; the toolkit's stub stands in for it.
RUN ln -s libcuda.so /usr/local/cuda/lib64/stubs/libcuda.so.1 \
    && LIBRARY_PATH=/usr/local/cuda/lib64/stubs \
    LDFLAGS=-Wl,-rpath-link,/usr/local/cuda/lib64/stubs \
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_RPC=ON -DMTMD_VIDEO=OFF -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES" \
    pip install --no-cache-dir "llama-cpp-python==$LLAMA" "scikit-build-core>=0.11" "nanobind>=2.4"
COPY . /src
RUN pip install --no-cache-dir --require-hashes -r /src/requirements.lock \
    && LDFLAGS="-Wl,-rpath-link,/usr/local/cuda/lib64/stubs -Wl,--allow-shlib-undefined" \
    pip install --no-cache-dir --no-build-isolation /src

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 dflash \
    && install -d -o dflash /data
COPY --from=build-cuda /opt/dflash-local /opt/dflash-local
ENV PATH=/opt/dflash-local/bin:$PATH HF_HOME=/data/huggingface DFLASH_LOCAL_CACHE=/data/cache
USER 10001
VOLUME /data
EXPOSE 8080
ENTRYPOINT ["dflash-local"]
CMD ["--help"]

FROM debian:trixie-slim AS cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 dflash \
    && install -d -o dflash /data
COPY --from=build-cpu /opt/dflash-local /opt/dflash-local
ENV PATH=/opt/dflash-local/bin:$PATH HF_HOME=/data/huggingface DFLASH_LOCAL_CACHE=/data/cache
USER 10001
VOLUME /data
EXPOSE 8080
ENTRYPOINT ["dflash-local"]
CMD ["--help"]
