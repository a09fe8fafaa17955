package secrets

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const key = ".dockerconfigjson"

// mount is a secret as the kubelet mounts it.
type mount struct {
	t     *testing.T
	dir   string
	stamp string // the folder in use
	count int
}

// newMount makes dir, with the files given by name.
func newMount(t *testing.T, dir string, files map[string]string) *mount {
	t.Helper()
	m := &mount{t: t, dir: dir}
	m.must(os.MkdirAll(dir, 0o755))
	m.swap(files)
	return m
}

// swap does what the kubelet does, in its order: the new folder, one rename, the links, and the old folder goes.
func (m *mount) swap(files map[string]string) {
	m.t.Helper()
	old := m.stamp
	m.count++
	m.stamp = fmt.Sprintf("..2026_12_01_10_00_00.%09d", m.count)
	m.must(os.Mkdir(filepath.Join(m.dir, m.stamp), 0o755))
	for name, data := range files {
		path := filepath.Join(m.dir, m.stamp, name)
		m.must(os.MkdirAll(filepath.Dir(path), 0o755))
		m.must(os.WriteFile(path, []byte(data), 0o644))
	}
	m.must(os.Symlink(m.stamp, filepath.Join(m.dir, "..data_tmp")))
	m.must(os.Rename(filepath.Join(m.dir, "..data_tmp"), filepath.Join(m.dir, "..data")))
	m.link()
	if old != "" {
		m.must(os.RemoveAll(filepath.Join(m.dir, old)))
	}
}

// link makes the visible names those of the folder in use.
func (m *mount) link() {
	m.t.Helper()
	visible, err := os.ReadDir(m.dir)
	m.must(err)
	for _, name := range visible {
		path := filepath.Join(m.dir, name.Name())
		if _, err := os.Stat(path); err != nil && !strings.HasPrefix(name.Name(), "..") {
			m.must(os.Remove(path))
		}
	}
	inUse, err := os.ReadDir(filepath.Join(m.dir, m.stamp))
	m.must(err)
	for _, name := range inUse {
		err := os.Symlink(filepath.Join("..data", name.Name()), filepath.Join(m.dir, name.Name()))
		if !os.IsExist(err) {
			m.must(err)
		}
	}
}

func (m *mount) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Error(err)
	}
}

// config is a file with one entry for r.io.
func config(user string) string {
	return fmt.Sprintf(`{"auths":{"r.io":{"username":%q,"password":"p"}}}`, user)
}

func write(t *testing.T, path, data string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
}

// load fails the test if Load waits for something.
func load(t *testing.T, dirs ...string) (*Keyring, []Problem) {
	t.Helper()
	type result struct {
		keyring  *Keyring
		problems []Problem
	}
	done := make(chan result, 1)
	go func() {
		keyring, problems := Load(dirs...)
		done <- result{keyring, problems}
	}()
	select {
	case got := <-done:
		return got.keyring, got.problems
	case <-time.After(10 * time.Second):
		t.Fatal("Load blocks")
		return nil, nil
	}
}

// names are those of the credentials for r.io, with the user of each.
func names(keyring *Keyring) []string {
	var all []string
	for _, c := range keyring.Lookup("r.io/x") {
		all = append(all, c.Name()+" "+c.Username)
	}
	return all
}

func TestLayouts(t *testing.T) {
	for name, test := range map[string]struct {
		make     func(t *testing.T, root string) // root is a folder to fill
		want     []string
		problems []string // without the root
	}{
		"a secret as the kubelet mounts it is read once": {
			func(t *testing.T, root string) {
				newMount(t, root+"/harbor", map[string]string{key: config("u")})
			}, []string{"harbor/r.io u"}, nil},
		"after a swap the new content is read": {
			func(t *testing.T, root string) {
				newMount(t, root+"/harbor", map[string]string{key: config("old")}).swap(map[string]string{key: config("new")})
			}, []string{"harbor/r.io new"}, nil},
		"secrets are in the order of their names": {
			func(t *testing.T, root string) {
				for _, name := range []string{"c", "a", "b10", "b2"} {
					newMount(t, root+"/"+name, map[string]string{key: config(name)})
				}
			}, []string{"a/r.io a", "b10/r.io b10", "b2/r.io b2", "c/r.io c"}, nil},
		"plain folders will do": {
			func(t *testing.T, root string) { write(t, root+"/harbor/"+key, config("u")) },
			[]string{"harbor/r.io u"}, nil},
		"so will a link to a folder": {
			func(t *testing.T, root string) {
				elsewhere := t.TempDir()
				newMount(t, elsewhere+"/x", map[string]string{key: config("u")})
				newMount(t, root+"/a", map[string]string{key: config("a")}).must(os.Symlink(elsewhere+"/x", root+"/harbor"))
			}, []string{"a/r.io a", "harbor/r.io u"}, nil},
		"one secret mounted directly has the folder's name": {
			func(t *testing.T, root string) { newMount(t, root, map[string]string{key: config("u")}) },
			[]string{"secrets/r.io u"}, nil},
		"a plain file directly too, and comes before folders": {
			func(t *testing.T, root string) {
				write(t, root+"/"+key, config("direct"))
				write(t, root+"/a/"+key, config("a"))
			}, []string{"secrets/r.io direct", "a/r.io a"}, nil},
		"a projected volume may hold folders": {
			func(t *testing.T, root string) {
				newMount(t, root, map[string]string{"b/" + key: config("b"), "a/" + key: config("a")})
			}, []string{"a/r.io a", "b/r.io b"}, nil},
		"an optional secret that is not there is no problem": {
			func(t *testing.T, root string) { newMount(t, root+"/optional", nil) }, nil, nil},
		"an empty secrets directory is none": {func(*testing.T, string) {}, nil, nil},
		"an optional secret that went is none": {
			func(t *testing.T, root string) {
				newMount(t, root+"/optional", map[string]string{key: config("u")}).swap(nil)
			}, nil, nil},
		"a mount that is still being made is an empty one": {
			func(t *testing.T, root string) {
				write(t, root+"/..2026_12_01_10_00_00.1/"+key, config("u"))
				write(t, root+"/harbor/..2026_12_01_10_00_00.1/"+key, config("u"))
			}, nil, nil},
		"an unknown key is named": {
			func(t *testing.T, root string) {
				newMount(t, root+"/tls", map[string]string{"tls.crt": "x", "tls.key": "y"})
			}, nil, []string{"secret tls: /tls: no pull secret: holds tls.crt, tls.key, read is .dockerconfigjson, .dockercfg, dockerconfigjson, *.json only"}},
		"not all of very many": {
			func(t *testing.T, root string) {
				for i := range 12 {
					write(t, fmt.Sprintf("%s/x/%02d", root, i), "")
				}
			}, nil, []string{"secret x: /x: no pull secret: holds 00, 01, 02, 03, 04, 05, 06, 07, 08, 09 and 2 more, read is .dockerconfigjson, .dockercfg, dockerconfigjson, *.json only"}},
		"an unknown key beside the known one is no problem": {
			func(t *testing.T, root string) {
				newMount(t, root+"/harbor", map[string]string{key: config("u"), "ca.crt": "x"})
			}, []string{"harbor/r.io u"}, nil},
		"a stray file beside folders is named alone": {
			func(t *testing.T, root string) {
				write(t, root+"/README", "")
				write(t, root+"/a/"+key, config("a"))
			}, []string{"a/r.io a"}, []string{"secret secrets: : no pull secret: holds README, read is .dockerconfigjson, .dockercfg, dockerconfigjson, *.json only"}},
		"a directory one level too high is named": {
			func(t *testing.T, root string) { write(t, root+"/pull/harbor/"+key, config("u")) },
			nil, []string{"secret pull: /pull: no pull secret: holds harbor, read is .dockerconfigjson, .dockercfg, dockerconfigjson, *.json only"}},
		"a broken secret stops no other": {
			func(t *testing.T, root string) {
				newMount(t, root+"/a", map[string]string{key: config("a")})
				newMount(t, root+"/b", map[string]string{key: "{"})
				newMount(t, root+"/c", map[string]string{key: config("c")})
			}, []string{"a/r.io a", "c/r.io c"}, []string{"secret b: /b/.dockerconfigjson: not valid JSON at byte 1; the kubelet refuses this secret"}},
		"a bad entry is named with its place": {
			func(t *testing.T, root string) {
				newMount(t, root+"/a", map[string]string{key: `{"auths":{"x.io":{"auth":"!"},"r.io":{"username":"u"}}}`})
			}, []string{"a/r.io u"}, []string{`secret a: /a/.dockerconfigjson: auths key "x.io": auth is not base64: entry dropped`}},
		"a fifo is not waited for": {
			func(t *testing.T, root string) {
				write(t, root+"/z/"+key, config("z"))
				write(t, root+"/a/x", "")
				if err := syscall.Mkfifo(root+"/a/"+key, 0o644); err != nil {
					t.Fatal(err)
				}
			}, []string{"z/r.io z"}, []string{"secret a: /a/.dockerconfigjson: not a regular file"}},
		"a fifo directly in the directory neither": {
			func(t *testing.T, root string) {
				if err := syscall.Mkfifo(root+"/"+key, 0o644); err != nil {
					t.Fatal(err)
				}
			}, nil, []string{"secret secrets: /.dockerconfigjson: not a regular file"}},
		"a device is not read": {
			func(t *testing.T, root string) {
				newMount(t, root+"/a", nil).must(os.Symlink("/dev/zero", root+"/a/..data/"+key))
			}, nil, []string{"secret a: /a/.dockerconfigjson: not a regular file"}},
		"a folder in place of the file is none": {
			func(t *testing.T, root string) { write(t, root+"/a/"+key+"/x", "") },
			nil, []string{"secret a: /a/.dockerconfigjson: not a regular file"}},
		"the largest file is read": {
			func(t *testing.T, root string) {
				write(t, root+"/a/"+key, config("u")+strings.Repeat(" ", maxFileSize-len(config("u"))))
			}, []string{"a/r.io u"}, nil},
		"one byte more is too much": {
			func(t *testing.T, root string) {
				write(t, root+"/a/"+key, config("u")+strings.Repeat(" ", maxFileSize-len(config("u"))+1))
			}, nil, []string{"secret a: /a/.dockerconfigjson: larger than 1 MiB"}},
		"a link to no folder is named": {
			func(t *testing.T, root string) {
				write(t, root+"/b/"+key, config("b"))
				if err := os.Symlink("nowhere", root+"/a"); err != nil {
					t.Fatal(err)
				}
			}, []string{"b/r.io b"}, []string{"secret a: /a: does not exist, or a link in it leads nowhere"}},
		"a link to no file is named": {
			func(t *testing.T, root string) {
				newMount(t, root+"/a", nil).must(os.Symlink("nowhere", root+"/a/..data/"+key))
			}, nil, []string{"secret a: /a: does not exist, or a link in it leads nowhere"}},
		"links in a circle are named": {
			func(t *testing.T, root string) {
				if err := os.Symlink("a", root+"/a"); err != nil {
					t.Fatal(err)
				}
			}, nil, []string{"secret a: /a: EvalSymlinks: too many links"}},
		"data that is a file is named": {
			func(t *testing.T, root string) { write(t, root+"/a/..data", "") },
			nil, []string{"secret a: /a: not a directory"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := filepath.Join(t.TempDir(), "secrets")
			if err := os.Mkdir(root, 0o755); err != nil {
				t.Fatal(err)
			}
			test.make(t, root)
			keyring, problems := load(t, root)
			if diff := cmp.Diff(test.want, names(keyring)); diff != "" {
				t.Errorf("credentials (-want +got):\n%s", diff)
			}
			var got []string
			for _, p := range problems {
				got = append(got, strings.ReplaceAll(p.String(), root, ""))
			}
			if diff := cmp.Diff(test.problems, got); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDirectoriesAreInTheOrderGiven(t *testing.T) {
	root := t.TempDir()
	newMount(t, root+"/1/z", map[string]string{key: config("1z")})
	newMount(t, root+"/2/a", map[string]string{key: config("2a")})
	newMount(t, root+"/3", map[string]string{key: config("3")})
	keyring, problems := load(t, root+"/3/", root+"/1", root+"/2")
	if diff := cmp.Diff([]string{"3/r.io 3", "z/r.io 1z", "a/r.io 2a"}, names(keyring)); diff != "" || problems != nil {
		t.Error(diff, problems)
	}
}

func TestTheCurrentDirectoryHasAName(t *testing.T) {
	root := t.TempDir()
	newMount(t, root+"/harbor", map[string]string{key: config("u")})
	t.Chdir(root + "/harbor")
	keyring, problems := load(t, ".")
	if diff := cmp.Diff([]string{"harbor/r.io u"}, names(keyring)); diff != "" || problems != nil {
		t.Error(diff, problems)
	}
}

func TestADirectoryThatCannotBeReadStopsNoOther(t *testing.T) {
	root := t.TempDir()
	write(t, root+"/file", "")
	newMount(t, root+"/good/a", map[string]string{key: config("a")})
	keyring, problems := load(t, root+"/none", root+"/file", root+"/good")
	if diff := cmp.Diff([]string{"a/r.io a"}, names(keyring)); diff != "" {
		t.Error(diff)
	}
	want := []Problem{
		{File: root + "/none", Message: "secrets directory: does not exist, or a link in it leads nowhere"},
		{File: root + "/file", Message: "secrets directory: not a directory"},
	}
	if diff := cmp.Diff(want, problems); diff != "" {
		t.Error(diff)
	}
}

func TestNoDirectoryGivesAnEmptyKeyring(t *testing.T) {
	keyring, problems := load(t)
	if keyring == nil || keyring.Lookup("r.io/x") != nil || problems != nil {
		t.Error(keyring, problems)
	}
}

// swaps runs check until 300 swaps are done. Between two there is the time for some reads; the kubelet's are a minute
// or more apart.
func swaps(t *testing.T, m *mount, files func(i int) map[string]string, check func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 300 {
			m.swap(files(i))
			time.Sleep(time.Millisecond)
		}
	}()
	for {
		check()
		select {
		case <-done:
			return
		default:
		}
	}
}

func TestASwapIsNeverSeenHalfDone(t *testing.T) {
	// Two entries that always agree, in a file of some size.
	content := func(i int) string {
		return fmt.Sprintf(`{"auths":{"r.io":{"username":"%[1]d"},"pad":%[2]s,"https://r.io":{"username":"%[1]d"}}}`,
			i, `{"email":"`+strings.Repeat("x", 8<<10)+`"}`)
	}
	for name, at := range map[string]struct{ mount, key string }{
		"in a folder for the secret":     {"/harbor", key},
		"in the directory itself":        {"", key},
		"in a folder of the same volume": {"", "harbor/" + key},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			files := func(i int) map[string]string { return map[string]string{at.key: content(i)} }
			m := newMount(t, root+at.mount, files(-1))
			swaps(t, m, files, func() {
				keyring, problems := Load(root)
				found := keyring.Lookup("r.io/x")
				if len(problems) > 0 || len(found) != 2 || found[0].Username != found[1].Username {
					t.Errorf("found %v, problems %v", found, problems)
				}
			})
		})
	}
}

func TestASecretThatComesAndGoesIsWholeOrAbsent(t *testing.T) {
	root := t.TempDir()
	m := newMount(t, root+"/optional", nil)
	files := func(i int) map[string]string {
		if i%2 == 0 {
			return map[string]string{key: config("u")}
		}
		return nil
	}
	swaps(t, m, files, func() {
		keyring, problems := Load(root)
		if got := names(keyring); len(problems) > 0 || len(got) > 1 {
			t.Errorf("found %v, problems %v", got, problems)
		}
	})
}

func TestARemovedFolderIsNoProblem(t *testing.T) {
	var l loader
	l.loadSecret("harbor", t.TempDir()+"/harbor")
	if l.problems != nil || l.entries != nil {
		t.Error(l)
	}
}

func TestASecretThatChangesAllTheTimeIsGivenUp(t *testing.T) {
	m := newMount(t, t.TempDir(), nil)
	reads := 0
	_, err := readStable(m.dir, func(string) (bool, error) {
		reads++
		m.swap(nil)
		return true, nil
	})
	if err != errChanging || reads != maxReads {
		t.Errorf("%v after %d reads", err, reads)
	}
}

func TestDeniedNamesModeOwnerAndUser(t *testing.T) {
	path := filepath.Join(t.TempDir(), key)
	write(t, path, "")
	if err := os.Chmod(path, 0o400); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("permission denied: %s has mode 0400 and belongs to uid %d gid %d, kip runs as uid 65532 gid 65533 (see fsGroup and defaultMode)",
		path, os.Geteuid(), info.Sys().(*syscall.Stat_t).Gid)
	if got := deniedMessage(path, info, 65532, 65533); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
