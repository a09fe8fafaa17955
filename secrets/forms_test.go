package secrets

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A secret's type is lost in a mount: each form of file that people mount, by its name.
func TestFormsOfFiles(t *testing.T) {
	const config, flat = `{"auths":{"r.io":{"auth":"dTpw"}}}`, `{"r.io":{"auth":"dTpw"}}`
	const account = `{"type":"service_account","private_key":"k:k\n"}`
	for name, test := range map[string]struct {
		files      map[string]string
		registries map[string]string
		want       string // user:password:whether a pod could use it, of each credential for r.io
		problem    string // part of the problems; empty for none
	}{
		".dockerconfigjson":                       {map[string]string{".dockerconfigjson": config}, nil, "u:p:true", ""},
		".dockercfg":                              {map[string]string{".dockercfg": flat}, nil, "u:p:true", ""},
		"config.json of an Opaque secret":         {map[string]string{"config.json": config}, nil, "u:p:false", "not by pods"},
		"auth.json":                               {map[string]string{"auth.json": config}, nil, "u:p:false", "not by pods"},
		"any name of a projected volume":          {map[string]string{"team-a.json": config}, nil, "u:p:false", "not by pods"},
		"dockerconfigjson without its dot":        {map[string]string{"dockerconfigjson": config}, nil, "u:p:false", "not by pods"},
		"a flat map in .dockerconfigjson":         {map[string]string{".dockerconfigjson": flat}, nil, "u:p:false", "flat map in a dockerconfigjson"},
		"a config.json in .dockercfg":             {map[string]string{".dockercfg": config}, nil, "u:p:false", "config.json in a dockercfg"},
		"a .dockercfg that is broken":             {map[string]string{".dockercfg": `[]`}, nil, "", "is not an object"},
		"two files of one secret":                 {map[string]string{".dockerconfigjson": config, "more.json": `{"auths":{"r.io":{"auth":"QTpC"}}}`}, nil, "u:p:true A:B:false", "not by pods"},
		"a user and a password for no registry":   {map[string]string{"username": "u", "password": "p"}, nil, "", "without a registry"},
		"a user and a password for one":           {map[string]string{"username": "u", "password": "p"}, map[string]string{"team": "r.io"}, "u:p:false", "not by pods"},
		"a newline after them goes":               {map[string]string{"username": "u\n", "password": "p\n"}, map[string]string{"team": "r.io"}, "u:p:false", "ends in a newline, which is dropped"},
		"one newline only":                        {map[string]string{"username": "u", "password": "p\n\n"}, map[string]string{"team": "https://r.io/v2/"}, "u:p\n:false", "dropped"},
		"a password alone is a token":             {map[string]string{"password": "p"}, map[string]string{"team": "r.io"}, ":p:false", "not by pods"},
		"another secret's registry is not ours":   {map[string]string{"username": "u", "password": "p"}, map[string]string{"other": "r.io"}, "", "without a registry"},
		"a registry that is no URL":               {map[string]string{"username": "u", "password": "p"}, map[string]string{"team": " r.io"}, "", "not a registry host or URL"},
		"a service account's key for no registry": {map[string]string{"key.json": account}, nil, "", "service account"},
		"a service account's key for one":         {map[string]string{"key.json": account}, map[string]string{"team": "r.io"}, "_json_key:" + account + ":false", "not by pods"},
		"JSON that is something else":             {map[string]string{"settings.json": `{"a":1}`}, nil, "", ""},
		"certificates are no credentials":         {map[string]string{"ca.crt": "x"}, nil, "", "no pull secret"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, data := range test.files {
				write(t, root+"/team/"+file, data)
			}
			keyring, problems := Loader{Dirs: []string{root}, Registries: test.registries}.Load()
			var got []string
			for _, c := range keyring.Lookup("r.io/x") {
				got = append(got, fmt.Sprintf("%s:%s:%t", c.Username, c.Password.Reveal(), c.Note == ""))
				if c.Source != "team" {
					t.Errorf("source %q", c.Source)
				}
			}
			if diff := cmp.Diff(test.want, strings.Join(got, " ")); diff != "" {
				t.Errorf("credentials (-want +got):\n%s", diff)
			}
			if (test.problem == "") != (len(problems) == 0) || !strings.Contains(messages(problems), test.problem) {
				t.Errorf("problems %v, want %q", problems, test.problem)
			}
		})
	}
}

func TestStrictPathsMatchWholeSegments(t *testing.T) {
	for _, test := range []struct {
		key, repository string
		loose, strict   int
	}{
		{"r.io/team", "r.io/team/app", 1, 1},
		{"r.io/team", "r.io/team", 1, 1},
		{"r.io/team", "r.io/team2/app", 1, 0},
		{"r.io/team/", "r.io/team/app", 1, 1},
		{"r.io", "r.io/team/app", 1, 1},
		{"*.io/te", "r.io/team/app", 1, 0},
		{"R.IO/team", "r.io/team2/app", 1, 0},
	} {
		root := t.TempDir()
		write(t, root+"/s/.dockerconfigjson", fmt.Sprintf(`{"auths":{%q:{"auth":"dTpw"}}}`, test.key))
		for strict, want := range map[bool]int{false: test.loose, true: test.strict} {
			keyring, _ := Loader{Dirs: []string{root}, StrictPaths: strict}.Load()
			if got := len(keyring.Lookup(test.repository)); got != want {
				t.Errorf("%s for %s, strict %t: %d credentials, want %d", test.key, test.repository, strict, got, want)
			}
		}
	}
}

func TestNearMissesSayWhatKeepsThemFromMatching(t *testing.T) {
	for key, why := range map[string]string{
		"reg.example.com:5443":       "the port is 5443, the image's is none",
		"reg.example.com/other":      "the path /other is not the beginning of /team/app",
		"reg.example.com/Team":       "the path /Team is not the beginning of /team/app",
		"*.example.com/other":        "the path /other is not the beginning of /team/app",
		"a.reg.example.com":          "the host has another number of parts, and a * is for one part",
		"example.com":                "the host has another number of parts, and a * is for one part",
		"registry.example.com":       "the host is another one",
		"reg.example.com":            "", // it matches
		"REG.example.com":            "", // and so does this, with a note
		"https://reg.example.com/v2": "",
		"reg.example.org":            "",
		"localhost":                  "",
	} {
		var want []NearMiss
		if why != "" {
			want = []NearMiss{{Key: key, Why: why}}
		}
		if diff := cmp.Diff(want, keyringOf(t, []string{key}).NearMisses("reg.example.com/team/app")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", key, diff)
		}
	}
	if found := (*Keyring)(nil).NearMisses("r.io/x"); found != nil {
		t.Errorf("found %v", found)
	}
}
