# fsdp-advisor serve, as a user without rights on a read-only filesystem:
#   docker build -t fsdp-advisor . && docker run --rm -p 8000:8000 --read-only --tmpfs /tmp fsdp-advisor
# With --build-arg EXTRAS=[torch] it can also record pasted configurations. The index of packages with PyTorch for the CPU, as
# --build-arg TORCH_INDEX=URL, keeps the image small: the default build of PyTorch contains CUDA.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=""
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
RUN python -m venv /app
COPY . .
RUN if [ -n "$EXTRAS" ]; then /app/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch; fi
RUN /app/bin/pip install ".${EXTRAS}"

FROM python:${PYTHON}-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin advisor
COPY --from=build /app /app
ENV PATH=/app/bin:$PATH PYTHONDONTWRITEBYTECODE=1 HOME=/tmp FSDP_ADVISOR_CACHE=/tmp/fsdp-advisor FSDP_ADVISOR_HOST=0.0.0.0 PORT=8000
USER 10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s \
  CMD ["python", "-c", "import os, urllib.request as r; e = os.environ; r.urlopen('http://127.0.0.1:' + (e.get('FSDP_ADVISOR_PORT') or e['PORT']) + '/healthz', timeout=4)"]
CMD ["fsdp-advisor", "serve"]
