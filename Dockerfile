# torch_lowcomm with the CPU build of torch: docker build -t torch_lowcomm . && docker run --rm torch_lowcomm
# Ranks in containers of several hosts need the host's network, or one open port each (docs/deployment.md): --network host.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends cmake g++ libssl-dev make ninja-build
WORKDIR /src
COPY . .
RUN make wheel DIST=/wheels

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
 && pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
COPY examples /examples
WORKDIR /examples
CMD ["python", "-m", "torch_lowcomm", "info"]
