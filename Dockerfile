# The image of kip: one static binary and the CA certificates, and nothing else.
ARG BUILDER=golang:1.26-bookworm
FROM ${BUILDER} AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
ARG COMMIT=
RUN make build VERSION="${VERSION}" COMMIT="${COMMIT}"

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /src/.cache/bin/kip /kip
# Not root, but of its group: containerd's socket is root:root and 0660.
USER 65532:0
ENTRYPOINT ["/kip"]
CMD ["run"]
