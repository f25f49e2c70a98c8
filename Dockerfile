# The course in a container, on Debian 12 with Debian's packages, built for this machine's own processor:
#
#   docker build --tag course .
#   docker run --interactive --tty --publish 127.0.0.1:8080:8080 course
#   build/stage8 serve --http 0.0.0.0:8080 --pool-controls    # inside: a page at http://localhost:8080 outside

# What the README's first command installs, for a user who may use sudo.
FROM debian:bookworm AS tools
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update && apt-get install --yes sudo && useradd --create-home --shell /bin/bash learner \
    && printf '%s\n' 'learner ALL=(ALL) NOPASSWD: ALL' 'Defaults env_keep += DEBIAN_FRONTEND' >/etc/sudoers.d/learner
COPY .ci/readme_command /packages/.ci/
COPY README.md /packages/
RUN bash -c 'command=$(/packages/.ci/readme_command course) && eval "${command%% && cmake *}"'
USER learner

# For .devcontainer: the sources are the editor's.
FROM tools AS editor
RUN sudo apt-get install --yes clangd gdb

# The course, built.
FROM tools AS course
COPY --chown=learner . /home/learner/course
WORKDIR /home/learner/course
RUN cmake --workflow --preset course
