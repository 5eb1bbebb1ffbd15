# For NVIDIA GPUs, whose driver the host has:  docker build -t surojax .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" surojax train --config tiny
# For CPUs:  docker build -t surojax-cpu --build-arg PACKAGE=. .
FROM python:3.12-slim-bookworm
ARG PACKAGE=.[cuda]
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in constraints.txt README.md LICENSE ./
COPY surojax surojax
COPY pallas_kernels pallas_kernels
COPY configs configs
RUN pip install --no-cache-dir -c constraints.txt "${PACKAGE}" \
    && useradd --uid 1000 --create-home surojax && install --directory --owner=surojax /work
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
COPY --chown=1000 configs configs
USER 1000
ENTRYPOINT ["surojax"]
CMD ["--help"]
