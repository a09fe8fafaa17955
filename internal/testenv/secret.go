package testenv

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
)

// Login is one entry of a pull secret.
type Login struct {
	Username, Password string
}

var secretVersion atomic.Int64

// MountSecret writes the pull secret dir/name with its entries by registry key,
// or replaces it, in the way the kubelet mounts a secret: a new folder, a
// symbolic link ..data that is renamed into place, and a link per key.
func MountSecret(t T, dir, name string, auths map[string]Login) {
	t.Helper()
	entries := map[string]map[string]string{}
	for key, l := range auths {
		entries[key] = map[string]string{"username": l.Username, "password": l.Password}
	}
	body, err := json.Marshal(map[string]any{"auths": entries})
	if err != nil {
		t.Fatalf("writing the secret %s: %v", name, err)
	}
	MountFile(t, dir, name, ".dockerconfigjson", body)
}

// MountFile is MountSecret for a secret with one key of any content.
func MountFile(t T, dir, name, key string, body []byte) {
	t.Helper()
	secret := filepath.Join(dir, name)
	version := "..2026_12_01." + strconv.FormatInt(secretVersion.Add(1), 10)
	old, _ := os.Readlink(filepath.Join(secret, "..data"))
	link := filepath.Join(secret, key)
	os.Remove(link)
	for _, err := range []error{
		os.MkdirAll(filepath.Join(secret, version), 0o755),
		os.WriteFile(filepath.Join(secret, version, key), body, 0o644),
		os.Symlink(version, filepath.Join(secret, "..data_tmp")),
		os.Rename(filepath.Join(secret, "..data_tmp"), filepath.Join(secret, "..data")),
		os.Symlink(filepath.Join("..data", key), link),
	} {
		if err != nil {
			t.Fatalf("writing the secret %s: %v", name, err)
		}
	}
	if old != "" {
		os.RemoveAll(filepath.Join(secret, old))
	}
}
