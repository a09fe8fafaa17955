// Package secrets turns mounted image pull secrets into credentials for one repository.
//
// Load reads the files of the secrets directories into a Keyring; Lookup gives the credentials that match a repository,
// in the order in which the kubelet would try them. Matching, order and parsing are those of the kubelet
// (k8s.io/kubernetes/pkg/credentialprovider), so that a secret that serves a pod serves kip and the other way round;
// where kip takes more than the kubelet does, a Problem says so.
package secrets

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path"
	"slices"
	"strings"
)

// hubKey is the normalised key whose credentials the kubelet offers to Docker Hub when nothing else matches. It is the
// host of `https://index.docker.io/v1/`, the key that `docker login` writes.
const hubKey = "index.docker.io"

// Keyring holds all credentials of the pull secrets. It does not change once loaded and may be used from many
// goroutines. A nil Keyring and the zero Keyring hold none.
type Keyring struct {
	// entries are in reverse byte order of their keys; those with one key are in the order they were read in.
	entries []entry
	strict  bool // paths match whole segments
}

// entry is a credential and what it is for.
type entry struct {
	key        string
	pattern    location
	relaxed    relaxation
	credential Credential
}

// location is a schemeless URL in the parts that are compared: a key's, where labels are globs, or a repository's.
type location struct {
	labels []string // the host, split at its dots
	port   string
	path   string
}

// newKeyring takes entries in secret order and file order and puts them in the kubelet's order (DockerKeyring.Add): its
// index is reversed as text, which is only roughly "most specific first".
func newKeyring(entries []entry) *Keyring {
	slices.SortStableFunc(entries, func(a, b entry) int { return cmp.Compare(b.key, a.key) })
	return &Keyring{entries: entries}
}

// Lookup returns the credentials for a repository, a normalised name without tag and digest such as
// `docker.io/library/nginx`, in the order to try them. Every key that matches gives all its credentials, the same
// user and password twice if two secrets hold them (kubelet: DockerKeyring.Lookup).
//
// After them come those that the kubelet does not find, each with a Note that says why: see relax.
//
// If no key matches a Docker Hub repository, the credentials for `index.docker.io` are returned. The kubelet does that
// for any host without dot and port, such as `localhost`, too, and so hands it the user's Hub password; kip does not.
func (k *Keyring) Lookup(repository string) []Credential {
	image, err := parseLocation(repository)
	if k == nil || err != nil {
		return nil
	}
	found := k.credentials(func(e entry) bool { return k.matches(e.pattern, image) })
	byHub := found == nil && isHub(repository)
	if byHub {
		found = k.credentials(func(e entry) bool { return e.key == hubKey })
	}
	return append(found, k.relaxed(image, byHub)...)
}

func (k *Keyring) credentials(wanted func(entry) bool) []Credential {
	var found []Credential
	for _, e := range k.entries {
		if wanted(e) {
			found = append(found, e.credential)
		}
	}
	return found
}

// relaxed returns the credentials that match only when keys and image are read with more goodwill. With byHub set the
// index key was used already.
func (k *Keyring) relaxed(image location, byHub bool) []Credential {
	goodwill := image.relax()
	var found []Credential
	for _, e := range k.entries {
		if k.matches(e.pattern, image) || byHub && e.key == hubKey || !k.matches(e.relaxed.location, goodwill.location) {
			continue
		}
		c := e.credential
		c.Note = cmp.Or(e.relaxed.why, goodwill.why)
		found = append(found, c)
	}
	return found
}

func isHub(repository string) bool {
	host, _, _ := strings.Cut(repository, "/")
	return host == "docker.io" || host == hubKey
}

func (k *Keyring) matches(key, image location) bool {
	return key.matches(image) && (!k.strict || image.path == key.path || strings.HasSuffix(key.path, "/") || key.path == "" ||
		strings.HasPrefix(image.path, key.path+"/"))
}

// newEntry makes the entry of one `auths` key. It fails where the key is no URL, without quoting it.
func newEntry(rawKey string, credential Credential) (entry, error) {
	key, err := normaliseKey(rawKey)
	if err != nil {
		return entry{}, err
	}
	pattern, err := parseLocation(key)
	if err != nil {
		return entry{}, err
	}
	credential.Key = displayKey(rawKey)
	return entry{key: key, pattern: pattern, relaxed: pattern.relax(), credential: credential}, nil
}

// normaliseKey returns the host and path of an `auths` key (kubelet: DockerKeyring.Add): no scheme, user information,
// query or fragment, and without the `/v1/` or `/v2/` that docker clients write. `/v2` without a final slash is a path
// like any other, letter case stays, and port 443 is not the same as none.
func normaliseKey(raw string) (string, error) {
	if !strings.HasPrefix(raw, "https://") && !strings.HasPrefix(raw, "http://") {
		raw = "https://" + raw
	}
	parsed, err := url.Parse(raw)
	if err != nil {
		return "", errNotURL
	}
	prefix := parsed.Path
	if strings.HasPrefix(prefix, "/v1/") || strings.HasPrefix(prefix, "/v2/") {
		prefix = prefix[len("/v1"):]
	}
	if prefix == "/" {
		prefix = ""
	}
	return parsed.Host + prefix, nil
}

// errNotURL stands for the errors of url.Parse, which quote what they were given.
var errNotURL = errors.New("not a registry host or URL")

// parseLocation splits a normalised key or a repository (kubelet: ParseSchemelessURL, SplitURL). A key goes through the
// URL parser a second time here, as it does in the kubelet, so `%2561` in a key means `a` to both.
func parseLocation(schemeless string) (location, error) {
	parsed, err := url.Parse("https://" + schemeless)
	if err != nil {
		return location{}, errNotURL
	}
	host, port, err := net.SplitHostPort(parsed.Host)
	if err != nil { // no port
		host, port = parsed.Host, ""
	}
	return location{labels: strings.Split(host, "."), port: port, path: parsed.Path}, nil
}

// matches reports whether the key l is for the image (kubelet: URLsMatch): a glob covers one label, ports are compared
// as text, and the path is a string prefix, so `r.io/team` is for `r.io/team2/app` too (kubernetes#102472).
func (l location) matches(image location) bool {
	if l.port != image.port || len(l.labels) != len(image.labels) || !strings.HasPrefix(image.path, l.path) {
		return false
	}
	for i, glob := range l.labels {
		if ok, err := path.Match(glob, image.labels[i]); err != nil || !ok {
			return false
		}
	}
	return true
}

// relaxation is a location read with more goodwill than the kubelet's, and what it took.
type relaxation struct {
	location location
	why      string
}

// relax reads a location as its author meant it: letter case in a host counts for nothing, `/v1` and `/v2` need no slash
// at their end, and all names of Docker Hub are one. The kubelet does none of this.
func (l location) relax() relaxation {
	r := relaxation{location: l}
	host := strings.Join(l.labels, ".")
	if lower := strings.ToLower(host); lower != host {
		host, r.why = lower, "the kubelet tells letter case in a host"
	}
	if l.path == "/v1" || l.path == "/v2" {
		r.location.path, r.why = "", "to the kubelet "+l.path+" without a slash at its end is a path"
	}
	if host != "docker.io" && slices.Contains(hubHosts, host) && l.port == "" {
		host, r.why = "docker.io", "to the kubelet "+host+" is another registry than docker.io"
	}
	r.location.labels = strings.Split(host, ".")
	return r
}

// hubHosts are the names under which people know Docker Hub.
var hubHosts = []string{"docker.io", "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com", "hub.docker.com"}

// NearMiss is a key that looks as if it were meant for a repository and is not used for it.
type NearMiss struct {
	Source, Key string
	// Why is what keeps it from matching.
	Why string
}

// NearMisses returns the keys for a repository's registry, or for one with a similar name, that do not match it.
func (k *Keyring) NearMisses(repository string) []NearMiss {
	image, err := parseLocation(repository)
	if k == nil || err != nil {
		return nil
	}
	image = image.relax().location
	var found []NearMiss
	for _, e := range k.entries {
		if why := e.relaxed.location.misses(image); why != "" {
			found = append(found, NearMiss{e.credential.Source, e.credential.Key, why})
		}
	}
	return slices.Compact(found)
}

// misses says why the key l is not for the image, in words; empty where it is, or has nothing to do with it.
func (l location) misses(image location) string {
	sameHost := location{labels: l.labels}.matches(location{labels: image.labels})
	n := min(2, len(l.labels), len(image.labels))
	sameDomain := n == 2 && slices.Equal(l.labels[len(l.labels)-n:], image.labels[len(image.labels)-n:])
	switch {
	case sameHost && l.port != image.port:
		return fmt.Sprintf("the port is %s, the image's is %s", orNone(l.port), orNone(image.port))
	case sameHost && !strings.HasPrefix(image.path, l.path):
		return fmt.Sprintf("the path %s is not the beginning of %s", l.path, image.path)
	case !sameHost && sameDomain && len(l.labels) != len(image.labels):
		return "the host has another number of parts, and a * is for one part"
	case !sameHost && sameDomain:
		return "the host is another one"
	}
	return ""
}

func orNone(port string) string { return cmp.Or(port, "none") }
