package secrets

import (
	"strings"
	"time"
)

// Credential is one user name and password of one pull secret. With both empty it is still a match, one that means
// anonymous: the kubelet takes an entry `{}` so, at its place in the order.
type Credential struct {
	// Source is the name of the secret's folder.
	Source string
	// Key is the `auths` key as written in the file, save that user information and a query in it, which may hold a
	// password, are replaced by "[redacted]".
	Key string
	// Username is empty for a token.
	Username string
	// Password is the password or the token.
	Password Secret
	// RegistryToken is set where Password is to be sent to the registry as a Bearer token, as it is.
	RegistryToken bool
	// Modified is when the secret's file was written, and Content the beginning of its SHA-256: enough to see which
	// version of a secret is in use. Both are empty for what is from no file.
	Modified time.Time
	Content  string
	// Note says why a pod could not use this credential: the kubelet does not find it for this repository. It is empty
	// where the kubelet finds it too.
	Note string
}

// Kind is what a credential is.
type Kind string

// The kinds of credentials.
const (
	Password      Kind = "password"
	IdentityToken Kind = "identitytoken" // an OAuth2 refresh token, given to the token service
	RegistryToken Kind = "registrytoken" // a Bearer token, given to the registry
	Anonymous     Kind = "anonymous"     // an empty entry: a match that means no login
)

// Kind returns what the credential is. Containerd takes a secret without a user for an identity token, and so does kip.
func (c Credential) Kind() Kind {
	switch {
	case c.RegistryToken:
		return RegistryToken
	case c.Username != "":
		return Password
	case c.Password != Secret{}:
		return IdentityToken
	}
	return Anonymous
}

// Name returns "SOURCE/KEY", the credential's name in logs and reports, such as `harbor/https://harbor.example.com`.
func (c Credential) Name() string {
	return c.Source + "/" + c.Key
}

// displayKey hides the parts of an `auths` key that may hold a password: all before an "@" and the values of a query.
// It works on the text because such a key often does not parse (`https://u:p/w@r.io`) and is to be named all the same.
func displayKey(key string) string {
	if at := strings.LastIndexByte(key, '@'); at >= 0 {
		scheme := ""
		if i := strings.Index(key[:at], "://"); i >= 0 {
			scheme = key[:i+len("://")]
		}
		key = scheme + redacted + key[at:]
	}
	if before, query, _ := strings.Cut(key, "?"); strings.Contains(query, "=") {
		key = before + "?" + redacted
	}
	return key
}
