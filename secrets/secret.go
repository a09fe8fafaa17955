package secrets

import (
	"fmt"
	"io"
	"log/slog"
	"unique"
)

// redacted is what every printed form of a Secret shows, an empty one too: even whether there is a password is nobody's business.
const redacted = "[redacted]"

// Secret holds a password that cannot be printed by accident: fmt (every verb), slog and the text and JSON encoders
// show "[redacted]". Only Reveal gives the value. The zero value is the empty password. Two Secrets are equal (==)
// when their values are.
type Secret struct {
	// A handle, not a string: fmt reaches an unexported field by reflection, past all methods below (a Credential in
	// an unexported field of another package's struct, or the verb %p), and then finds an address only.
	handle unique.Handle[string]
}

// NewSecret returns a Secret that holds value.
func NewSecret(value string) Secret {
	if value == "" {
		return Secret{}
	}
	return Secret{handle: unique.Make(value)}
}

// Reveal returns the value. The only use for it is to send it to a registry.
func (s Secret) Reveal() string {
	if s == (Secret{}) {
		return ""
	}
	return s.handle.Value()
}

// String returns "[redacted]".
func (Secret) String() string { return redacted }

// GoString returns "[redacted]".
func (Secret) GoString() string { return redacted }

// Format writes "[redacted]" whatever the verb: without it %x and %d would pass by String.
func (Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, redacted) }

// MarshalText returns "[redacted]".
func (Secret) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// MarshalJSON returns the JSON string "[redacted]".
func (Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + redacted + `"`), nil }

// LogValue returns "[redacted]".
func (Secret) LogValue() slog.Value { return slog.StringValue(redacted) }
