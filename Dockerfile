# The server in an image. For CPUs (a tenth of the download):
#     docker build -t continuum-engine .
# For NVIDIA GPUs:
#     docker build -t continuum-engine --build-arg TORCH_INDEX=https://pypi.org/simple --build-arg EXTRAS=[gpu,pictures,audio] .
FROM python:3.12-slim

# The CPU kernels are compiled on the machine they run on, at the first start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=[pictures,audio]

WORKDIR /src
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY engine engine
COPY continuum continuum
COPY estimator estimator
COPY tracing tracing
COPY eval eval
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt ".${EXTRAS}"

# Compiled kernels, downloaded models and what was learned of tools outlive the container in this volume.
RUN useradd --uid 1000 --create-home continuum \
    && mkdir /data \
    && chown continuum /data
ENV XDG_CACHE_HOME=/data/cache HF_HOME=/data/huggingface
VOLUME /data
WORKDIR /data
USER 1000

EXPOSE 8000
HEALTHCHECK --start-period=120s --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["continuum", "serve"]
CMD ["--port", "8000", "--estimator-state", "/data/tools.json"]
