package secrets

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// unprivileged runs f without root's right to read everything: Linux has a user for file access in each thread.
func unprivileged(f func()) {
	if os.Geteuid() == 0 {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		_ = syscall.Setfsuid(65534)
		defer func() { _ = syscall.Setfsuid(0) }()
	}
	f()
}

func TestASecretThatMayNotBeReadIsNamedAndStopsNoOther(t *testing.T) {
	for name, test := range map[string]struct {
		closed  string // below the root
		mode    os.FileMode
		problem Problem // without the root
	}{
		"the file":                      {"/a/" + key, 0, Problem{Source: "a", File: "/a/" + key, Message: "permission denied: /a/" + key + " has mode 0000 and belongs to uid"}},
		"the folder":                    {"/a", 0, Problem{Source: "a", File: "/a", Message: "permission denied: /a has mode 0000 and belongs to uid"}},
		"a folder that only lists":      {"/a", 0o444, Problem{Source: "a", File: "/a", Message: "permission denied: /a has mode 0444 and belongs to uid"}},
		"a folder that is only entered": {"/a", 0o111, Problem{Source: "a", File: "/a", Message: "permission denied: /a has mode 0111 and belongs to uid"}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.Chmod(filepath.Dir(root), 0o755); err != nil {
				t.Fatal(err)
			}
			write(t, root+"/a/"+key, config("a"))
			write(t, root+"/b/"+key, config("b"))
			if err := os.Chmod(root+test.closed, test.mode); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = os.Chmod(root+test.closed, 0o755) }()

			var keyring *Keyring
			var problems []Problem
			unprivileged(func() { keyring, problems = Load(root) })
			if diff := cmp.Diff([]string{"b/r.io b"}, names(keyring)); diff != "" {
				t.Error(diff)
			}
			if len(problems) != 1 {
				t.Fatal(problems)
			}
			got := problems[0]
			got.File = strings.TrimPrefix(got.File, root)
			got.Message = strings.ReplaceAll(got.Message, root, "")
			if !strings.HasPrefix(got.Message, test.problem.Message) || !strings.Contains(got.Message, "kip runs as uid ") {
				t.Errorf("message: %s", got.Message)
			}
			got.Message = test.problem.Message
			if diff := cmp.Diff(test.problem, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
