package puller

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// maxBlob bounds a manifest or configuration that is read. The largest in the
// field have some hundred kilobytes, and registries bound manifests at 4 MiB.
const maxBlob = 8 << 20

// verified reads manifests and configurations whose bytes are those of their
// digest. The daemon does not look: after a power failure a blob's file may be
// empty, and all that is known of it well.
type verified struct {
	content.Provider
}

// brokenError says that a blob is there and not what it should be.
type brokenError struct {
	digest digest.Digest
	why    string
}

func (e *brokenError) Error() string { return fmt.Sprintf("%s %s", e.digest, e.why) }

// ReaderAt returns a reader of the whole blob, which is in memory.
func (v verified) ReaderAt(ctx context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	b, err := v.read(ctx, desc)
	if err != nil {
		return nil, err
	}
	return blob{bytes.NewReader(b)}, nil
}

// read returns the bytes of a blob. It fails with a brokenError when they are not
// those of the digest, and with NotFound when there are none.
func (v verified) read(ctx context.Context, desc ocispec.Descriptor) ([]byte, error) {
	ra, err := v.Provider.ReaderAt(ctx, desc)
	if err != nil {
		return nil, err
	}
	defer ra.Close()
	if ra.Size() > maxBlob {
		return nil, &brokenError{desc.Digest, fmt.Sprintf("has %d bytes, more than a manifest or configuration may have (%d)", ra.Size(), maxBlob)}
	}
	b := make([]byte, ra.Size())
	n, err := ra.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		if isDaemonError(ctx, err) {
			return nil, err
		}
		return nil, &brokenError{desc.Digest, fmt.Sprintf("cannot be read: %v", err)}
	}
	if digest.FromBytes(b[:n]) != desc.Digest {
		return nil, &brokenError{desc.Digest, fmt.Sprintf("has other bytes on the disk, %d of them", n)}
	}
	return b, nil
}

// isDaemonError tells a daemon that does not answer from one that says no.
func isDaemonError(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errdefs.IsUnavailable(err) || errdefs.IsCanceled(err) || errdefs.IsDeadlineExceeded(err)
}

// blob is a content.ReaderAt of bytes.
type blob struct{ *bytes.Reader }

func (blob) Close() error { return nil }
