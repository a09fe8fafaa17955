# Everything is made below .cache, in the tree, and in Go's own caches.
BIN     := .cache/bin
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)
CODE    := cmd deploy internal puller resolver secrets
TOOL    := go tool -modfile=internal/tools/go.mod

.DEFAULT_GOAL := build
.PHONY: build test test-all faults lint demo demo-stop bench clean

build: ## the static binary, .cache/bin/kip
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/kip ./cmd/kip

test: ## all tests, with the race detector; the summary names what was left out
	$(TOOL) gotestsum --format pkgname-and-test-fails --format-hide-empty-pkg -- -race -timeout 20m ./...
	cd internal/tools/kubelet && go tool -modfile=../go.mod gotestsum --format standard-verbose -- ./...

test-all: test ## the tests of daemon and program on each containerd from 1.6 on, and the faults
	for v in 1.6 1.7 2.3; do echo "containerd $$v"; TEST_CONTAINERD=$$v $(TOOL) gotestsum --format pkgname-and-test-fails -- -timeout 20m ./puller ./cmd/kip || exit 1; done
	TEST_ROUNDS=50 go test -count=1 -timeout 20m -run TestKipAndTheKubelet ./puller
	$(MAKE) faults

faults: ## kip killed at 100 random moments, containerd at 30: what is lost and fetched again
	TEST_ROUNDS=100 go test -count=1 -v -timeout 30m -run TestAKilledKip ./cmd/kip
	TEST_ROUNDS=30 go test -count=1 -v -timeout 30m -run TestAKilledContainerd ./cmd/kip

lint: ## formatting, vet, staticcheck
	@unformatted=$$(gofmt -l $(CODE)); test -z "$$unformatted" || { echo "gofmt would change: $$unformatted"; exit 1; }
	go vet ./...
	$(TOOL) staticcheck ./...
	go mod tidy -diff

demo: ## the whole of kip in one command, on a real containerd; KEEP=1 leaves it up
	go run ./internal/testenv/demo $(if $(KEEP),-keep)

demo-stop: ## end what make demo KEEP=1 left up
	go run ./internal/testenv/demo -stop

bench: ## kip against crictl, by turns
	go run ./internal/testenv/bench

clean: demo-stop ## remove all that was made
	rm -rf .cache
