// Package kubelet holds kip's keyring against the kubelet's own.
package kubelet

import (
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/distribution/reference"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/credentialprovider"
	kubelet "k8s.io/kubernetes/pkg/credentialprovider/secrets"

	"example.com/kip/secrets"
)

// pairs is how many pairs of a set of secrets and an image are compared.
const pairs = 100_000

// improvements are all differences that are meant to be. Tokens, other forms of files and credential helpers, of which
// the kubelet knows nothing, are not generated here; package secrets tests them.
var improvements = []struct {
	name, why string
	explains  func(kubeletFails bool, image string, kip, kubelet []string) bool
}{
	{
		"a bad entry costs itself only", "the kubelet gives up all secrets of a pod for one entry that it cannot decode",
		func(fails bool, _ string, kip, kubelet []string) bool { return fails && slices.Equal(kip, kubelet) },
	},
	{
		"Docker Hub's login is for Docker Hub only", "the kubelet offers it to every host without a dot and a port",
		func(_ bool, image string, kip, kubelet []string) bool {
			host, _, _ := strings.Cut(image, "/")
			return len(kip) == 0 && len(kubelet) > 0 && !strings.ContainsAny(host, ".:")
		},
	},
}

// noted is the third one: credentials that only kip finds say so by their Note. They come after all others, or in place
// of an entry that the kubelet refuses, and are left out of the comparison.
const noted = "credentials with a note"

// entry is one key of a pull secret with its JSON.
type entry struct{ key, body string }

// The grammar of keys: the shapes of credentials specification 1.4 to 1.7, weighted so that matches are frequent.
var (
	schemes = []string{"", "", "", "https://", "http://", "HTTPS://", "oci://", "//", " "}
	hosts   = []string{"r.io", "r.io", "r.io", "a.r.io", "r.io:443", "R.IO", "*.io", "*.r.io", "r.*", "*", "r?io", "app*.r.io", "*.*.io",
		"docker.io", "index.docker.io", "registry-1.docker.io", "hub.docker.com", "*.docker.io", "localhost", "localhost:5000", "10.0.0.*",
		"10.0.0.7", "[::1]:5000", "[::1]", "myreg", "user@r.io", "u:p@r.io", "r%2eio", "", "*.io:443"}
	prefixes = []string{"", "", "", "/", "/v1/", "/v2/", "/v2", "/v1", "/team", "/team/", "/te", "/v2/team", "/team/app", "/t%65am", "/team?x=y",
		"/team#f", "/*", "/team/app:v1", "//team", "/library", "/library/nginx", "/%2574eam", "?x=y"}
	imageHosts = []string{"r.io", "r.io", "r.io", "r.io:443", "a.r.io", "app1.r.io", "docker.io", "docker.io", "index.docker.io",
		"registry-1.docker.io", "localhost", "localhost:5000", "10.0.0.7", "[::1]:5000", "MYREG", "myreg.local"}
	imagePaths = []string{"team/app", "team/app", "team2/app", "team", "te", "x", "nginx", "library/nginx", "v2/team", "a/b/c"}
)

func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// generate makes one to three secrets.
func generate(r *rand.Rand) [][]entry {
	var all [][]entry
	for s := range 1 + r.IntN(3) {
		var entries []entry
		for i := range 1 + r.IntN(5) {
			key := pick(r, schemes) + pick(r, hosts) + pick(r, prefixes)
			entries = append(entries, entry{key, body(r, fmt.Sprintf("s%de%d", s, i))})
		}
		all = append(all, entries)
	}
	return all
}

// body makes the JSON of an entry, by section 1.3. The user tells the entries apart.
func body(r *rand.Rand, user string) string {
	std := base64.StdEncoding.EncodeToString([]byte(user + ":p:w\n"))
	switch r.IntN(120) {
	case 0:
		return `{}`
	case 1:
		return `null`
	case 2:
		return `{"auth":"!!!"}`
	case 3:
		return `{"auth":"` + base64.StdEncoding.EncodeToString([]byte(user)) + `"}` // no colon
	case 4:
		return `{"auth":123}`
	case 5:
		return `{"auth":" ` + std + ` "}`
	case 6:
		return `{"auth":"` + base64.URLEncoding.EncodeToString([]byte(user+":\xff\xfe\xfb")) + `"}`
	case 7:
		return `{"username":"` + user + `","password":7}`
	case 8:
		return `["` + user + `"]`
	case 9:
		return `{"AUTH":"` + std + `\n","username":"other"}`
	case 10:
		return `{"auth":"` + base64.RawStdEncoding.EncodeToString([]byte(user+":pw")) + `"}`
	case 11:
		return `{"auth":"","Username":"` + user + `","PASSWORD":"p"}`
	case 12:
		return `{"username":"` + user + `"}`
	case 13:
		return `{"username":"` + user + `","email":"e","unknown":[1]}`
	}
	return `{"auth":"` + std + `"}`
}

func config(entries []entry) []byte {
	var members []string
	for _, e := range entries {
		key, _ := json.Marshal(e.key)
		members = append(members, string(key)+":"+e.body)
	}
	return []byte(`{"auths":{` + strings.Join(members, ",") + `}}`)
}

// keyringOf is the kubelet's for these secrets.
func keyringOf(all [][]entry) (credentialprovider.DockerKeyring, error) {
	var list []corev1.Secret
	for _, entries := range all {
		list = append(list, corev1.Secret{Type: corev1.SecretTypeDockerConfigJson, Data: map[string][]byte{corev1.DockerConfigJsonKey: config(entries)}})
	}
	return kubelet.MakeDockerKeyring(list, &credentialprovider.BasicDockerKeyring{})
}

// decodable are the entries that the kubelet can decode. Of one key twice the last counts, also where it cannot.
func decodable(all [][]entry) [][]entry {
	var good [][]entry
	for _, entries := range all {
		var kept []entry
		for i, e := range entries {
			again := slices.ContainsFunc(entries[i+1:], func(later entry) bool { return later.key == e.key })
			if _, err := keyringOf([][]entry{{e}}); err == nil && !again {
				kept = append(kept, e)
			}
		}
		good = append(good, kept)
	}
	return good
}

// shuffles is how often the kubelet's keyring is built anew to look for kip's order: it puts two keys of one file that mean
// the same place in the order of a Go map, which changes.
const shuffles = 200

type tally struct {
	pairs int
	by    map[string]int
}

// compare holds both against each other for one seed.
func compare(t *testing.T, dir string, seed uint64, images int, count *tally) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	all := generate(r)
	for i, entries := range all {
		folder := filepath.Join(dir, fmt.Sprint(i))
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, ".dockerconfigjson"), config(entries), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for i := len(all); i < 3; i++ {
		os.RemoveAll(filepath.Join(dir, fmt.Sprint(i)))
	}
	kip, _ := secrets.Load(dir)
	_, err := keyringOf(all)
	fails := err != nil
	good := decodable(all)
	theirs, err := keyringOf(good)
	if err != nil {
		t.Fatalf("seed %d: the kubelet cannot decode together what it can decode apart: %v", seed, err)
	}
	for range images {
		named, err := reference.ParseNormalizedNamed(pick(r, imageHosts) + "/" + pick(r, imagePaths))
		if err != nil {
			continue
		}
		image := named.Name()
		var ours []string
		for _, c := range kip.Lookup(image) {
			if c.Note != "" {
				count.by[noted]++
				continue
			}
			ours = append(ours, c.Username+"/"+c.Password.Reveal())
		}
		count.pairs++
		found := lookup(theirs, image)
		for range shuffles {
			if slices.Equal(ours, found) || len(ours) != len(found) {
				break
			}
			theirs, _ = keyringOf(good)
			found = lookup(theirs, image)
		}
		explained := slices.Equal(ours, found) && !fails
		for _, i := range improvements {
			if !explained && i.explains(fails, image, ours, found) {
				explained = true
				count.by[i.name]++
			}
		}
		if !explained {
			t.Fatalf("seed %d, image %s:\nkip      %q\nkubelet  %q\nsecrets  %q", seed, image, ours, found, all)
		}
	}
}

func lookup(k credentialprovider.DockerKeyring, image string) []string {
	var list []string
	found, _ := k.Lookup(image)
	for _, c := range found {
		list = append(list, c.Username+"/"+c.Password)
	}
	return list
}

// TestMain silences the kubelet's log, which has a line for each key that is no URL.
func TestMain(m *testing.M) {
	var flags flag.FlagSet
	klog.InitFlags(&flags)
	flags.Set("logtostderr", "false")
	flags.Set("stderrthreshold", "FATAL")
	klog.SetOutput(io.Discard)
	os.Exit(m.Run())
}

func TestKipFindsWhatTheKubeletFinds(t *testing.T) {
	const images = 40
	count := tally{by: map[string]int{}}
	dir := t.TempDir()
	for seed := uint64(0); count.pairs < pairs; seed++ {
		compare(t, dir, seed, images, &count)
	}
	t.Logf("%d pairs, no unexplained difference; explained: %v", count.pairs, count.by)
	for _, i := range improvements {
		if count.by[i.name] == 0 {
			t.Errorf("nothing was explained by %q: it is no difference, or is not generated", i.name)
		}
	}
}

func FuzzKeyring(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		compare(t, t.TempDir(), seed, 20, &tally{by: map[string]int{}})
	})
}
