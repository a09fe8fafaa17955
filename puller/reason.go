package puller

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"

	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"

	"example.com/kip/resolver"
)

// Reason says in one word why an image is not present. The list is closed:
// programs decide by it.
type Reason string

// The reasons of a failed or skipped image.
const (
	InvalidReference    Reason = "InvalidReference"
	NotFound            Reason = "NotFound"
	Unauthorized        Reason = "Unauthorized"
	Denied              Reason = "Denied"
	RateLimited         Reason = "RateLimited"
	RegistryUnavailable Reason = "RegistryUnavailable"
	NetworkError        Reason = "NetworkError"
	TLSError            Reason = "TLSError"
	BadHostsConfig      Reason = "BadHostsConfig"
	NotAnImage          Reason = "NotAnImage"
	NoMatchingPlatform  Reason = "NoMatchingPlatform"
	DigestMismatch      Reason = "DigestMismatch"
	BadLayer            Reason = "BadLayer"
	NoSpace             Reason = "NoSpace"
	Stalled             Reason = "Stalled"
	DaemonUnavailable   Reason = "DaemonUnavailable"
	PolicyBypass        Reason = "PolicyBypass"
	UnsupportedLayer    Reason = "UnsupportedLayer"
	DeadlineExceeded    Reason = "DeadlineExceeded"
	Cancelled           Reason = "Cancelled"
	BackOff             Reason = "BackOff"
	NotSelected         Reason = "NotSelected"
	GCRemoved           Reason = "GCRemoved"
	Internal            Reason = "Internal"
)

// passing tells whether the same pull may succeed a moment later.
func (r Reason) passing() bool {
	switch r {
	case RateLimited, RegistryUnavailable, NetworkError, Stalled, DaemonUnavailable, DigestMismatch, Internal:
		return true
	}
	return false
}

// resumable tells whether what was fetched before is of use to a later pull.
func (r Reason) resumable() bool {
	return r.passing() && r != DigestMismatch && r != Internal || r == Cancelled || r == DeadlineExceeded
}

// hopeless tells whether the same pull fails again for as long as the image and the
// daemon are the same.
func (r Reason) hopeless() bool {
	switch r {
	case NotAnImage, NoMatchingPlatform, BadLayer, UnsupportedLayer:
		return true
	}
	return false
}

// reasonOf finds the reason behind an error of a pull. Types decide where there
// are types; the daemon's own errors arrive over gRPC as text.
func reasonOf(err error) Reason {
	if err == nil {
		return ""
	}
	if r := reasonOfRegistry(err); r != "" {
		return r
	}
	if r := reasonOfOwn(err); r != "" {
		return r
	}
	// A stream to a daemon that has gone says EOF when something is sent into it.
	if errdefs.IsUnavailable(err) || strings.Contains(err.Error(), "failed to send write: EOF") {
		return DaemonUnavailable
	}
	text := err.Error()
	isLayer := strings.Contains(text, "failed to extract layer") && !errors.Is(err, context.Canceled)
	switch r := reasonOfNetwork(err); {
	case strings.Contains(text, "no space left on device"):
		return NoSpace
	case isLayer && strings.Contains(text, "stream processor for"): // there is none, or its program is not there
		return UnsupportedLayer
	case isLayer, strings.Contains(text, "wrong diff id"), strings.Contains(text, "number of layers and diffIDs"):
		return BadLayer
	case r != "":
		return r
	case strings.Contains(text, "reports content size of zero"):
		return NotAnImage
	case strings.Contains(text, "unexpected commit digest"), strings.Contains(text, "unexpected commit size"):
		return DigestMismatch
	case strings.Contains(text, "no match for platform"):
		return NoMatchingPlatform
	case errdefs.IsNotFound(err):
		return NotFound
	}
	return Internal
}

// reasonOfOwn finds the reason in kip's own refusals.
func reasonOfOwn(err error) Reason {
	var space *spaceError
	var broken *brokenError
	switch {
	case errors.Is(err, errOtherPlatform):
		return NoMatchingPlatform
	case errors.Is(err, errNotRunnable):
		return NotAnImage
	case errors.As(err, &space):
		return NoSpace
	case errors.As(err, &broken):
		return DigestMismatch
	case errors.Is(err, errPolicy):
		return PolicyBypass
	case errors.Is(err, errRemoved):
		return GCRemoved
	}
	return ""
}

// reasonOfRegistry finds a reason in a registry's answer.
func reasonOfRegistry(err error) Reason {
	var status int
	var refused *resolver.RefusedError
	var paused *resolver.PausedError
	var unexpected remoteerrors.ErrUnexpectedStatus
	switch {
	case errors.Is(err, resolver.ErrNotAnImage):
		return NotAnImage
	case errors.Is(err, resolver.ErrRealm):
		return Denied
	case errors.Is(err, resolver.ErrHostsConfig):
		return BadHostsConfig
	case errors.As(err, &refused):
		status = refused.Status()
	case errors.As(err, &paused):
		status = paused.Status
	case errors.As(err, &unexpected):
		status = unexpected.StatusCode
	}
	switch {
	case status == http.StatusUnauthorized:
		return Unauthorized
	case status == http.StatusForbidden:
		return Denied
	case status == http.StatusNotFound:
		return NotFound
	case status == http.StatusTooManyRequests:
		return RateLimited
	case status >= 500:
		return RegistryUnavailable
	}
	return ""
}

// reasonOfNetwork finds a reason in what happened on the way to a registry.
func reasonOfNetwork(err error) Reason {
	var (
		record   tls.RecordHeaderError
		alert    tls.AlertError
		verify   *tls.CertificateVerificationError
		unknown  x509.UnknownAuthorityError
		hostname x509.HostnameError
		netErr   net.Error
	)
	switch {
	case errors.Is(err, resolver.ErrStalled):
		return Stalled
	case errors.As(err, &record), errors.As(err, &alert), errors.As(err, &verify), errors.As(err, &unknown), errors.As(err, &hostname),
		strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return TLSError
	case errors.Is(err, context.DeadlineExceeded) && !isTransport(err):
		return DeadlineExceeded
	case errors.Is(err, context.Canceled):
		return Cancelled
	case errors.As(err, &netErr), errors.Is(err, syscall.ECONNRESET), strings.Contains(err.Error(), "unexpected EOF"):
		return NetworkError
	}
	return ""
}

// isTransport tells a time limit of the network from one of kip's own.
func isTransport(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) || strings.Contains(err.Error(), "timeout awaiting response headers")
}

// message is what a person reads of an error: one line without secrets. What a
// registry refused says itself all that there is to say.
func message(err error) string {
	var refused *resolver.RefusedError
	if errors.As(err, &refused) {
		err = refused
	}
	return resolver.Sanitize(err.Error())
}
