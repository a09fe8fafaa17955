package secrets

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"example.com/kip/internal/testenv"
)

const repository = "r.io/x"

// secretOf is a config whose two keys have the same user, so that a half of it shows.
func secretOf(user string) map[string]string {
	return map[string]string{".dockerconfigjson": fmt.Sprintf(`{"auths":{"r.io":{"username":%q},"s.io":{"username":%q}}}`, user, user)}
}

func TestAStoreFollowsItsSecrets(t *testing.T) {
	root := t.TempDir()
	m := newMount(t, root+"/a", secretOf("one"))
	s := NewStore(Loader{Dirs: []string{root}}, nil)
	s.Refresh()
	ctx, stop := context.WithCancel(t.Context())
	changed := make(chan struct{}, 100)
	var watch sync.WaitGroup
	watch.Go(func() { s.Watch(ctx, func() { changed <- struct{}{} }) })
	defer watch.Wait()
	defer stop()
	for _, step := range []struct {
		name string
		do   func()
		want string
	}{
		{"the kubelet swaps the secret", func() { m.swap(secretOf("two")) }, "two"},
		{"and again", func() { m.swap(secretOf("three")) }, "three"},
		{"another secret appears", func() { newMount(t, root+"/b", secretOf("b")) }, "three b"},
		{"a plain file is written", func() { write(t, root+"/c/.dockerconfigjson", secretOf("c")[".dockerconfigjson"]) }, "three b c"},
		{"a secret is removed", func() { m.must(os.RemoveAll(root + "/b")) }, "three c"},
		{"its key goes", func() { m.swap(nil) }, "c"},
		{"and comes back", func() { m.swap(secretOf("four")) }, "four c"},
	} {
		step.do()
		limit := time.After(time.Minute)
		for strings.Join(users(s.keyring.Load(), repository), " ") != step.want {
			select {
			case <-changed:
			case <-limit:
				t.Fatalf("%s: users %q, want %s", step.name, users(s.keyring.Load(), repository), step.want)
			}
		}
	}
}

func TestABrokenSecretKeepsWhatItHad(t *testing.T) {
	root := t.TempDir()
	m := newMount(t, root+"/a", secretOf("good"))
	s := NewStore(Loader{Dirs: []string{root}}, nil)
	for _, step := range []struct {
		name    string
		content map[string]string
		want    string
		problem string
	}{
		{"it is good", secretOf("good"), "good", ""},
		{"it is half a JSON", map[string]string{".dockerconfigjson": `{"auths":{"r.io":`}, "good", "what it held before is used"},
		{"it stays so", map[string]string{".dockerconfigjson": `{"auths":{"r.io":`}, "good", "what it held before is used"},
		{"it is empty", map[string]string{".dockerconfigjson": ""}, "good", "what it held before is used"},
		{"it has one bad entry", map[string]string{".dockerconfigjson": `{"auths":{"r.io":{"auth":"!"},"s.io":{"username":"s"}}}`}, "", "entry dropped"},
		{"it is good again", secretOf("new"), "new", ""},
		{"it has no entry", map[string]string{".dockerconfigjson": `{"auths":{}}`}, "", ""},
		{"it is broken when nothing good was before", map[string]string{".dockerconfigjson": `{`}, "", "not valid JSON"},
	} {
		m.swap(step.content)
		before := s.Generation()
		old := strings.Join(users(s.keyring.Load(), repository), " ")
		problems := s.Refresh()
		if got := strings.Join(users(s.keyring.Load(), repository), " "); got != step.want {
			t.Errorf("%s: users %q, want %q", step.name, got, step.want)
		}
		if !strings.Contains(messages(problems), step.problem) || step.problem == "" && len(problems) > 0 {
			t.Errorf("%s: problems %v, want %q", step.name, problems, step.problem)
		}
		if old == step.want && step.want != "" && s.Generation() != before {
			t.Errorf("%s: a new generation without a change", step.name)
		}
	}
}

func TestAThousandSwapsAreNeverSeenHalf(t *testing.T) {
	root := t.TempDir()
	m := newMount(t, root+"/a", secretOf("0"))
	s := NewStore(Loader{Dirs: []string{root}}, nil)
	s.Refresh()
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				s.Refresh()
				k := s.keyring.Load()
				one, two := users(k, "r.io/x"), users(k, "s.io/x")
				if len(one) != 1 || len(two) != 1 || one[0] != two[0] {
					t.Errorf("half a secret: %q and %q", one, two)
					return
				}
			}
		})
	}
	for i := range 1000 {
		m.swap(secretOf(fmt.Sprint(i)))
	}
	close(done)
	readers.Wait()
}

func TestASecretThatNeverChangesIsNamed(t *testing.T) {
	testenv.NeedRoot(t)
	root := t.TempDir()
	path := root + "/a/.dockerconfigjson"
	write(t, path, secretOf("u")[".dockerconfigjson"])
	if err := syscall.Mount(path, path, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(path, syscall.MNT_DETACH)
	keyring, problems := Load(root)
	if got := users(keyring, repository); len(got) != 1 || !strings.Contains(messages(problems), "subPath") {
		t.Errorf("users %q, problems %v", got, problems)
	}
}
