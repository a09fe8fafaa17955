package secrets

import (
	"fmt"
	"strings"
	"unicode"
)

// Problem says what is wrong with a secrets directory, a secret, a file or one entry. It names places, never a value
// from the file. Some problems are warnings about a credential that is used nevertheless; the message says which.
type Problem struct {
	// Source is the name of the secret's folder; empty where a whole secrets directory is meant.
	Source string
	// Key is the `auths` key, as in Credential.Key; empty where a whole file is meant.
	Key string
	// File is the path as seen in the mount, without the `..data` folder, so that it outlives a rotation.
	File    string
	Message string
}

// String returns the problem on one line.
func (p Problem) String() string {
	var place []string
	if p.Source != "" {
		place = append(place, "secret "+p.Source)
	}
	if p.File != "" {
		place = append(place, p.File)
	}
	if p.Key != "" {
		place = append(place, fmt.Sprintf("auths key %q", p.Key))
	}
	return strings.Map(printable, strings.Join(append(place, p.Message), ": "))
}

// Error returns the same as String.
func (p Problem) Error() string {
	return p.String()
}

// printable keeps a file name with a line break in it from starting a second line in a log.
func printable(r rune) rune {
	if !unicode.IsPrint(r) {
		return unicode.ReplacementChar
	}
	return r
}
