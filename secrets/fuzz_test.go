package secrets

import (
	"encoding/json"
	"strings"
	"testing"
)

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		`{"auths":{"r.io":{"auth":"dTpw"},"https://r.io/v2/":{"username":"u","password":"p"}}}`,
		`{"auths":{"r.io":{"auth":" dTr__vs= "},"r.io":null,"":{},"\u0000":{"auth":"!!!"},"u:p@h":{"auth":3}}}`,
		`{"auths":{"a":{}},"auths":null,"AUTHS":{"b":{"AUTH":"dTpw\n"}}}`,
		`{"auths":[]}`, `{"HttpHeaders":{"X":["y"]},"auths":{"r.io":{}}}`,
		`{"r.io":{"auth":"dTpw"}}`, `{"credsStore":"desktop"}`, `null`, ``, "\xef\xbb\xbf{}", `eyJhdXRocyI6e319`, `{} x`, "{\"auths\":{\"\xff\":{}}}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, problems := parseDockerConfigJSON(data)
		dropped := 0
		for _, p := range problems {
			if strings.ContainsAny(p.String(), "\r\n") {
				t.Errorf("%q is not one line", p)
			}
			if strings.HasSuffix(p.Message, "entry dropped") || strings.Contains(p.Message, "is for a credential helper") {
				dropped++
			}
		}
		// The kubelet's decoding into a map says how many entries there are: none is lost without a word. One may give
		// several credentials.
		var reference struct{ Auths map[string]json.RawMessage }
		if json.Unmarshal(data, &reference) == nil && len(entries)+dropped < len(reference.Auths) {
			t.Errorf("%d entries and %d dropped of %d", len(entries), dropped, len(reference.Auths))
		}
		keyring := newKeyring(entries)
		for i, e := range keyring.entries {
			if i > 0 && keyring.entries[i-1].key < e.key {
				t.Errorf("%q is before %q", keyring.entries[i-1].key, e.key)
			}
		}
	})
}

func FuzzMatch(f *testing.F) {
	for _, seed := range [][2]string{
		{"r.io", "r.io/team/app"}, {"https://r.io/v2/team", "r.io/team2/app"}, {"*.foo.bar:5000", "a.foo.bar:5000/x"},
		{"https://index.docker.io/v1/", "docker.io/library/nginx"}, {"index.docker.io", "localhost/x"}, {"[::1]:5000", "[::1]:5000/x"},
		{"//r.io", "r.io"}, {"r.io/%2561", "r.io/a"}, {"\\*", "*"}, {"u:p@r.io?x=y", "r.io/x"}, {"[", "["}, {"", ""},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, key, repository string) {
		e, err := newEntry(key, Credential{Username: "u"})
		if err != nil {
			return
		}
		keyring := newKeyring([]entry{e})
		if found := keyring.Lookup(repository); len(found) == 0 || found[0].Note != "" {
			return // not the kubelet's match
		}
		image, err := parseLocation(repository)
		if err != nil {
			t.Fatal("matches what is no repository")
		}
		if e.key == hubKey && isHub(repository) {
			return
		}
		if image.port != e.pattern.port || len(image.labels) != len(e.pattern.labels) || !strings.HasPrefix(image.path, e.pattern.path) {
			t.Errorf("%q matches %q", key, repository)
		}
		// A key that is for a repository is for all below it.
		if !strings.ContainsAny(repository, "?#") && len(keyring.Lookup(repository+"/below")) == 0 {
			t.Errorf("%q matches %q but nothing below", key, repository)
		}
	})
}
