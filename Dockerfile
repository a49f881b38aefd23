# jpeg-dlm serve on a CPU:  docker build -t jpeg-dlm . && docker run --rm -p 127.0.0.1:8000:8000 jpeg-dlm
FROM python:3.11-slim
WORKDIR /opt/jpeg-dlm
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# The CPU build of torch first: the default one would bring gigabytes for GPUs.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)" \
 && pip install --no-cache-dir -c constraints.txt '.[serve]' \
 && useradd --create-home serve
USER serve
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=5)"]
ENTRYPOINT ["jpeg-dlm", "serve", "--host", "0.0.0.0"]
