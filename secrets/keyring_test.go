package secrets

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// keyringOf makes a keyring of one secret for each list of keys. The user name of an entry says where it is from, such
// as "2:r.io" for the second secret.
func keyringOf(t *testing.T, secrets ...[]string) *Keyring {
	t.Helper()
	var all []entry
	for i, keys := range secrets {
		var members []string
		for _, key := range keys {
			name, _ := json.Marshal(key)
			user, _ := json.Marshal(fmt.Sprintf("%d:%s", i+1, key))
			members = append(members, fmt.Sprintf(`%s:{"username":%s}`, name, user))
		}
		entries, _ := parseDockerConfigJSON([]byte(`{"auths":{` + strings.Join(members, ",") + `}}`))
		all = append(all, entries...)
	}
	return newKeyring(all)
}

// users are the user names that a lookup gives and the kubelet's would too.
func users(k *Keyring, repository string) []string {
	var all []string
	for _, c := range k.Lookup(repository) {
		if c.Note == "" {
			all = append(all, c.Username)
		}
	}
	return all
}

func TestOneKeyMatches(t *testing.T) {
	const a, b, c = "r.io/team/app", "r.io:443/team/app", "r.io/team2/app"
	hub := []string{"docker.io/library/nginx", "docker.io/acme/app", "index.docker.io/library/nginx"}
	for name, test := range map[string]struct {
		keys    []string
		yes, no []string
	}{
		"a host, whatever surrounds it, is for all of the registry": {
			[]string{"r.io", "https://r.io", "http://r.io", "r.io/", "https://r.io/v1/", "https://r.io/v2/", "r.io/v1/", "r.io?x=y", "r.io#f", "https://user:pass@r.io"},
			[]string{a, c, "r.io", "r.io/x"}, []string{b, "s.io/x", "a.r.io/x", "rxio/x", "localhost/x"}},
		"v1 and v2 without a final slash are paths": {
			[]string{"https://r.io/v2", "https://r.io/v1", "r.io/v1"}, nil, []string{a, b, c}},
		"a path is a string prefix": {
			[]string{"r.io/team", "r.io/te", "r.io/v2/team", "r.io/team?x=y", "user@r.io", "r.io/t%65am"}, []string{a, c}, []string{b}},
		"a path with a final slash ends there": {
			[]string{"r.io/team/", "r.io/v2/team/", "r.io/team/app"}, []string{a}, []string{b, c}},
		"a port must be equal, the default one too": {
			[]string{"r.io:443", "https://r.io:443"}, []string{b}, []string{a, c, "r.io:4430/x"}},
		"odd keys are for nothing": {
			[]string{"R.IO", "HTTPS://r.io", "oci://r.io", "//r.io", " r.io", "", "r.io/team/app:v1", "r.io//team", "r.io/*", "r.io/team/*", "r.io:*", "*", "r?io", "r.i\\o", "[r].io"},
			nil, []string{a, b, c}},
		"a glob is for one label":                   {[]string{"*.io", "r.*", "r*.i*"}, []string{a, c}, []string{b}},
		"no more and no less labels":                {[]string{"*.foo.bar"}, []string{"a.foo.bar/x"}, []string{"foo.bar/x", "a.b.foo.bar/x", "a.foo.bar:5000/x"}},
		"a glob without a dot is within its label":  {[]string{"*foo.bar"}, []string{"afoo.bar/x", "foo.bar/x"}, []string{"a.foo.bar/x"}},
		"two globs are for two":                     {[]string{"*.*.foo.bar"}, []string{"a.b.foo.bar/x"}, []string{"a.foo.bar/x"}},
		"a glob may be part of a label":             {[]string{"app*.foo.bar"}, []string{"app1.foo.bar/x", "app.foo.bar/x"}, []string{"xapp.foo.bar/x"}},
		"a glob has a port":                         {[]string{"*.foo.bar:5000"}, []string{"a.foo.bar:5000/x"}, []string{"a.foo.bar/x"}},
		"a glob has a path":                         {[]string{"*.foo.bar/team"}, []string{"a.foo.bar/team/x", "a.foo.bar/teammate/x"}, []string{"a.foo.bar/x"}},
		"ECR in any account and region":             {[]string{"*.dkr.ecr.*.amazonaws.com"}, []string{"123.dkr.ecr.us-east-1.amazonaws.com/x"}, []string{"123.dkr.ecr.cn-north-1.amazonaws.com.cn/x"}},
		"addresses have globs":                      {[]string{"10.0.0.*"}, []string{"10.0.0.7/x"}, []string{"10.0.1.7/x", "10.0.0.7:5000/x"}},
		"IPv6 with a port":                          {[]string{"[::1]:5000"}, []string{"[::1]:5000/x"}, []string{"[::1]:5001/x"}},
		"IPv6 without one is a glob that fails":     {[]string{"[::1]"}, nil, []string{"[::1]/x", "[::1]:5000/x"}},
		"localhost with a port":                     {[]string{"localhost:5000"}, []string{"localhost:5000/x"}, []string{"localhost/x"}},
		"a lone star is for a host of one label":    {[]string{"*"}, []string{"localhost/x", "MYREG/app"}, hub},
		"globs are for Docker Hub":                  {[]string{"*.io", "docker.*"}, hub[:2], []string{"registry-1.docker.io/library/nginx"}},
		"the Hub's index key is for the Hub only":   {[]string{"https://index.docker.io/v1/", "index.docker.io", "https://index.docker.io/v2/"}, hub, []string{"registry-1.docker.io/library/nginx", "localhost/app", "MYREG/app", "LOCALHOST/x", "localhost:5000/x", "r.io/x", "mydocker.io/x"}},
		"the index key without a slash is for none": {[]string{"https://index.docker.io/v1"}, nil, append(hub, "localhost/app")},
		"docker.io is for the Hub":                  {[]string{"docker.io", "https://docker.io"}, hub[:2], []string{"registry-1.docker.io/library/nginx", "localhost/app"}},
		"docker.io has paths":                       {[]string{"docker.io/acme"}, []string{"docker.io/acme/app"}, []string{"docker.io/library/nginx"}},
		"registry-1 is another registry":            {[]string{"registry-1.docker.io", "https://registry-1.docker.io/v2/"}, []string{"registry-1.docker.io/library/nginx"}, append(hub, "localhost/app")},
		"other names of the Hub are for nothing": {[]string{"index.docker.io/acme", "https://index.docker.io/v1/acme", "hub.docker.com", "registry.hub.docker.com", "docker.com", "auth.docker.io"},
			nil, append(hub[:2:2], "registry-1.docker.io/library/nginx", "localhost/app")},
		"a glob below docker.io is not for the Hub": {[]string{"*.docker.io"}, []string{"registry-1.docker.io/library/nginx"}, append(hub[:2:2], "localhost/app")},
		"a path under the registry's host":          {[]string{"https://reg.example.com/v2/", "reg.example.com/org/foo"}, []string{"reg.example.com/org/foo-secret"}, []string{"reg.example.com:5443/org/foo"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, key := range test.keys {
				keyring := keyringOf(t, []string{key})
				for _, repository := range test.yes {
					if len(users(keyring, repository)) != 1 {
						t.Errorf("key %q is not for %s", key, repository)
					}
				}
				for _, repository := range test.no {
					if len(users(keyring, repository)) != 0 {
						t.Errorf("key %q is for %s", key, repository)
					}
				}
			}
		})
	}
}

func TestLookupOrder(t *testing.T) {
	for name, test := range map[string]struct {
		secrets    [][]string
		repository string
		want       []string
	}{
		"longer paths come before shorter ones and globs": {
			[][]string{{"r.io", "r.io/team", "r.io/team/", "r.io/team/app", "*.io"}}, "r.io/team/app",
			[]string{"1:r.io/team/app", "1:r.io/team/", "1:r.io/team", "1:r.io", "1:*.io"}},
		"exact hosts come before globs": {
			[][]string{{"*.foo.bar", "app*.foo.bar", "app.foo.bar"}}, "app.foo.bar/x",
			[]string{"1:app.foo.bar", "1:app*.foo.bar", "1:*.foo.bar"}},
		"it is the reverse order of bytes, not the longer path": {
			[][]string{{"*.foo.bar/aaa/bbb", "xyz.foo.bar/aaa"}}, "xyz.foo.bar/aaa/bbb/c",
			[]string{"1:xyz.foo.bar/aaa", "1:*.foo.bar/aaa/bbb"}},
		"one key in two secrets is in secret order": {
			[][]string{{"r.io"}, {"r.io"}}, "r.io/x", []string{"1:r.io", "2:r.io"}},
		"the key comes before the secret order": {
			[][]string{{"r.io"}, {"r.io/team"}, {"r.io/team/app"}}, "r.io/team/app",
			[]string{"3:r.io/team/app", "2:r.io/team", "1:r.io"}},
		"two spellings in one file are in file order": {
			[][]string{{"r.io", "https://r.io/v2/", "http://r.io"}}, "r.io/x",
			[]string{"1:r.io", "1:https://r.io/v2/", "1:http://r.io"}},
		"whatever that is": {
			[][]string{{"http://r.io", "r.io", "https://r.io/v2/"}}, "r.io/x",
			[]string{"1:http://r.io", "1:r.io", "1:https://r.io/v2/"}},
		"two spellings in two files are in secret order": {
			[][]string{{"https://r.io"}, {"r.io", "r.io/v1/"}, {"https://r.io"}}, "r.io/x",
			[]string{"1:https://r.io", "2:r.io", "2:r.io/v1/", "3:https://r.io"}},
		"the Hub's index key is left out where docker.io matches": {
			[][]string{{"https://index.docker.io/v1/", "docker.io"}}, "docker.io/library/nginx", []string{"1:docker.io"}},
		"and used where only another Hub path does": {
			[][]string{{"https://index.docker.io/v1/", "docker.io/acme"}}, "docker.io/library/nginx", []string{"1:https://index.docker.io/v1/"}},
		"all index keys are used, in order": {
			[][]string{{"index.docker.io"}, {"https://index.docker.io/v1/"}}, "docker.io/library/nginx",
			[]string{"1:index.docker.io", "2:https://index.docker.io/v1/"}},
		"nothing matches nothing":        {[][]string{{"r.io"}}, "s.io/x", nil},
		"no repository matches nothing":  {[][]string{{"", "*", "r.io"}}, "\x00", nil},
		"an empty keyring finds nothing": {nil, "r.io/x", nil},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, users(keyringOf(t, test.secrets...), test.repository)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestVeryManySecretsWithTheSameKeysKeepTheirOrder(t *testing.T) {
	var secrets [][]string
	var want []string
	for i := range 100 {
		secrets = append(secrets, []string{"r.io", "r.io/x", "*.io"})
		want = append(want, fmt.Sprintf("%d:r.io", i+1))
	}
	if diff := cmp.Diff(want, users(keyringOf(t, secrets...), "r.io/y")[:100]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestNoKeyringFindsNothing(t *testing.T) {
	var none *Keyring
	if none.Lookup("r.io/x") != nil || (&Keyring{}).Lookup("docker.io/library/nginx") != nil {
		t.Error("found something")
	}
}

func TestLookupsDoNotShareTheirResult(t *testing.T) {
	keyring := keyringOf(t, []string{"r.io"})
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 100 {
				found := keyring.Lookup("r.io/x")
				if len(found) != 1 || found[0].Username != "1:r.io" {
					t.Error("changed by another lookup")
					return
				}
				found[0].Username = "mine"
			}
		})
	}
	group.Wait()
}

func TestTenThousandKeysAreNoBurden(t *testing.T) {
	var keys []string
	for i := range 10_000 {
		keys = append(keys, fmt.Sprintf("r.io/team%05d/", i))
	}
	start := time.Now()
	keyring := keyringOf(t, keys)
	for i := range 100 {
		if got := users(keyring, fmt.Sprintf("r.io/team%05d/app", i)); len(got) != 1 {
			t.Fatalf("found %v", got)
		}
	}
	// A second or so with the race detector; quadratic work takes minutes.
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("took %v", took)
	}
}

func BenchmarkLookupAmongTenThousandKeys(b *testing.B) {
	var entries []entry
	for i := range 10_000 {
		e, _ := newEntry(fmt.Sprintf("r%d.io/team", i), Credential{Username: "u"})
		entries = append(entries, e)
	}
	keyring := newKeyring(entries)
	for b.Loop() {
		keyring.Lookup("r9.io/team/app")
	}
}

func TestKipFindsWhatTheKubeletDoesNotAndSaysWhy(t *testing.T) {
	for name, test := range map[string]struct {
		key, repository string
		note            string // part of it; empty for no match at all
	}{
		"v2 without a slash":                     {"https://r.io/v2", "r.io/team/app", "/v2 without a slash"},
		"v1 without a slash":                     {"r.io/v1", "r.io/team/app", "/v1 without a slash"},
		"a host in upper case":                   {"R.IO", "r.io/team/app", "letter case"},
		"an image in upper case":                 {"myreg", "MyReg/app", "letter case"},
		"the index key without a slash":          {"https://index.docker.io/v1", "docker.io/library/nginx", "another registry than docker.io"},
		"the API's host as a key":                {"registry-1.docker.io", "docker.io/library/nginx", "another registry than docker.io"},
		"the web site as a key":                  {"https://hub.docker.com", "docker.io/acme/app", "another registry than docker.io"},
		"the API's host as an image":             {"docker.io", "registry-1.docker.io/library/nginx", "another registry than docker.io"},
		"the Hub's names have paths too":         {"index.docker.io/acme", "docker.io/acme/app", "another registry than docker.io"},
		"which must match":                       {"index.docker.io/acme", "docker.io/other/app", ""},
		"a path in upper case is another path":   {"r.io/Team", "r.io/team/app", ""},
		"a port is not forgiven":                 {"R.IO:443", "r.io/team/app", ""},
		"the Hub's password is for the Hub only": {"https://index.docker.io/v1/", "localhost/app", ""},
	} {
		t.Run(name, func(t *testing.T) {
			k := keyringOf(t, []string{test.key})
			if kubelet := users(k, test.repository); kubelet != nil {
				t.Fatalf("found without a note: %q", kubelet)
			}
			found := k.Lookup(test.repository)
			if test.note == "" {
				if found != nil {
					t.Errorf("found %v", found)
				}
				return
			}
			if len(found) != 1 || !strings.Contains(found[0].Note, test.note) {
				t.Errorf("found %+v, want one with the note %q", found, test.note)
			}
		})
	}
}

func TestWhatTheKubeletFindsComesFirstAndOnce(t *testing.T) {
	k := keyringOf(t, []string{"https://index.docker.io/v1/", "R.IO", "r.io", "r.io/v2"})
	var all []string
	for _, repository := range []string{"r.io/app", "docker.io/library/nginx"} {
		for _, c := range k.Lookup(repository) {
			all = append(all, fmt.Sprint(c.Username, " ", c.Note != ""))
		}
	}
	want := []string{"1:r.io false", "1:r.io/v2 true", "1:R.IO true", "1:https://index.docker.io/v1/ false"}
	if diff := cmp.Diff(want, all); diff != "" {
		t.Error(diff)
	}
}
